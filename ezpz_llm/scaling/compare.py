"""Two studies side by side: the same points of both, and what else is different (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.observe.tables import Table
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.scaling.efficiency import CONFIDENCE, Estimate, Measured, ratio
from ezpz_llm.scaling.findings import Findings
from ezpz_llm.scaling.tables import STEPS_ONLY, interval_text

_NO_BEARING = ("EZPZ_LLM_RUN_DIR", "EZPZ_LLM_RUN_ID", "EZPZ_LLM_SECRET", "EZPZ_LLM_ENDS_AT",
               "EZPZ_LLM_TERMINAL", "EZPZ_LLM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that differ from run to run."""


@dataclass(frozen=True)
class Pair:
    """One point in both studies. `faster` is tokens a second of the second over the first; `efficiencies` are None
    at the smallest points, which are 100 % by definition."""

    first: Measured
    second: Measured
    faster: Estimate
    efficiencies: tuple[Estimate, Estimate] | None

    @property
    def verdict(self) -> str:
        """Verdict that the interval allows."""
        if self.faster.interval is None:
            return "error not known"
        low, high = self.faster.interval
        return "faster" if low > 1 else "slower" if high < 1 else "no difference shown"


@dataclass(frozen=True)
class Comparison:
    """`pairs` are points of the same mode, layout and size; `alone` the names of points that only one study has;
    `differences` are settings and variables with each study's value."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    differences: dict[str, tuple[str, str]]

    def as_record(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "studies": list(self.names), "confidence": CONFIDENCE,
            "points": [{"point": pair.first.name, "tokens_per_second": [pair.first.tokens_per_second,
                                                                         pair.second.tokens_per_second],
                        "ratio": pair.faster.value, "ratio_interval": pair.faster.interval,
                        "efficiency": [one.value for one in pair.efficiencies] if pair.efficiencies else None,
                        "verdict": pair.verdict} for pair in self.pairs],
            "only_in": [list(names) for names in self.alone],
            "differences": {name: list(values) for name, values in self.differences.items()}}


def compare(first: Findings, second: Findings) -> Comparison:
    """Compare two studies.

    Raises:
        UserError: they have no point in common.
    """
    ours, theirs = ({_key(point): point for point in one.points if point.good} for one in (first, second))
    common = [key for key in ours if key in theirs]
    if not common:
        raise UserError("the studies have no point in common", where=f"{first.name}, {second.name}",
                        instead="studies of the same mode, layout and sizes")
    pairs = []
    for key in common:
        one, other = ours[key], theirs[key]
        before, after = _efficiency(first, one), _efficiency(second, other)
        work = other.first.step_tokens / one.first.step_tokens
        pairs.append(Pair(one, other, ratio(one.step_time, other.step_time, work),
                          (before, after) if before and after else None))
    alone = (tuple(point.name for key, point in ours.items() if key not in theirs),
             tuple(point.name for key, point in theirs.items() if key not in ours))
    settings = _differences(first, second, [(ours[key].name, theirs[key].name) for key in common])
    for pair in pairs:
        ours_batch, theirs_batch = (f"{one.first.global_batch} x {one.first.block_size}"
                                    for one in (pair.first, pair.second))
        if ours_batch != theirs_batch:
            settings[f"tokens of a step at {pair.first.name}"] = (ours_batch, theirs_batch)
    return Comparison((first.name, second.name), tuple(pairs), alone, settings)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The pairs, and what is different."""
    a, b = comparison.names
    rows = []
    for pair in comparison.pairs:
        shares = [f"{one.value:.1%}" for one in pair.efficiencies] if pair.efficiencies else ["-", "-"]
        rows.append((pair.first.name, *(short_number(one.tokens_per_second) for one in (pair.first, pair.second)),
                     f"{pair.faster.value:.1%}", interval_text(pair.faster), *shares, pair.verdict))
    tables = [Table(f"A: {a}\nB: {b}", ("point", "A tok/s", "B tok/s", "B / A", f"{CONFIDENCE:.0%} interval",
                                        "A effic.", "B effic.", "B is"), tuple(rows), comparison_notes(comparison))]
    if comparison.differences:
        tables.append(Table("What is different", ("setting", "A", "B"), tuple(
            (name, *values) for name, values in comparison.differences.items())))
    return tables


def comparison_notes(comparison: Comparison) -> tuple[str, ...]:
    """Notes on the comparison."""
    found = [f"only in {name}: {', '.join(points)}"
             for name, points in zip(comparison.names, comparison.alone, strict=True) if points]
    if any(pair.faster.basis == "steps" for pair in comparison.pairs):
        found.append(STEPS_ONLY)
    if (settings := len(comparison.differences.keys() - {"command"})) > 1:
        found.append(f"the studies differ in {settings} settings: what differs between their numbers has no single "
                     "cause")
    return tuple(found)


def _key(point: Measured) -> tuple[str, str, int, int]:
    return point.mode, point.ds_config, point.nodes, point.ranks


def _efficiency(findings: Findings, point: Measured) -> Estimate | None:
    curve = next((one for one in findings.curves if any(mine is point for mine in one.points)), None)
    return curve.efficiency(point) if curve and point is not curve.base else None


def _differences(first: Findings, second: Findings, names: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Environments of the common points that differ, each name once, with the first pair that does."""
    found: dict[str, tuple[str, str]] = {}
    ours, theirs = " ".join(first.typed), " ".join(second.typed)
    if ours != theirs:
        found["command"] = (ours, theirs)
    for name, other in names:
        one, two = (origins[key].environment if key in origins else {} for origins, key in
                    ((first.provenance, name), (second.provenance, other)))
        for key in dict.fromkeys((*one, *two)):
            values = (one.get(key, "-"), two.get(key, "-"))
            if values[0] != values[1] and key not in _NO_BEARING:
                found.setdefault(key, values)
    return found
