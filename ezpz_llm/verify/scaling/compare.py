"""Comparison of two studies: their common points, and differing settings (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ezpz_llm.core.base import UserError
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Estimate, Measured, ratio
from ezpz_llm.verify.scaling.findings import Findings
from ezpz_llm.verify.scaling.tables import STEPS_ONLY, interval_text

_IGNORED = ("EZPZ_LLM_RUN_DIR", "EZPZ_LLM_RUN_ID", "EZPZ_LLM_SECRET", "EZPZ_LLM_ENDS_AT",
               "EZPZ_LLM_TERMINAL", "EZPZ_LLM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that differ between any two runs."""


@dataclass(frozen=True)
class Pair:
    """A point that both studies measured.

    Attributes:
        speed_ratio: tokens/s of the second study divided by those of the first.
        efficiencies: None at the smallest points, where efficiency is 100 % by definition.
    """

    first: Measured
    second: Measured
    speed_ratio: Estimate
    efficiencies: tuple[Estimate, Estimate] | None

    @property
    def verdict(self) -> str:
        """Verdict on the second study's speed at CONFIDENCE."""
        if self.speed_ratio.interval is None:
            return "no difference shown" if self.speed_ratio.is_too_wide else "error unknown"
        low, high = self.speed_ratio.interval
        return "faster" if low > 1 else "slower" if high < 1 else "no difference shown"


class PairRecord(Struct, frozen=True):
    """Member of `points` in the output of `scale compare --json`: a point that both studies measured."""

    point: str
    tokens_per_second: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float] | None
    efficiency: tuple[float, float] | None
    verdict: str


class ComparisonRecord(Struct, frozen=True):
    """Output of `scale compare --json`."""

    studies: tuple[str, str]
    confidence: float
    points: list[PairRecord]
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    differences: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two studies.

    Attributes:
        pairs: points of the same mode, layout and size.
        only_in: for each study, the points that the other study does not have.
        differences: settings and variables with each study's value.
    """

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    differences: dict[str, tuple[str, str]]

    def record(self) -> ComparisonRecord:
        """Return the output of `scale compare --json`."""
        return ComparisonRecord(
            studies=self.names, confidence=CONFIDENCE,
            points=[PairRecord(
                point=pair.first.name,
                tokens_per_second=(pair.first.tokens_per_second, pair.second.tokens_per_second),
                ratio=pair.speed_ratio.value, ratio_interval=pair.speed_ratio.interval,
                efficiency=pair.efficiencies and (pair.efficiencies[0].value, pair.efficiencies[1].value),
                verdict=pair.verdict) for pair in self.pairs],
            only_in=self.only_in, differences=self.differences)


def compare(first: Findings, second: Findings) -> Comparison:
    """Compare two studies.

    Raises:
        UserError: the studies have no points in common.
    """
    points_a, points_b = ({_key(point): point for point in study.points if point.good} for study in (first, second))
    common = [key for key in points_a if key in points_b]
    if not common:
        raise UserError("the studies have no points in common", where=f"{first.name}, {second.name}",
                        instead="studies of the same mode, layout and sizes")
    pairs = []
    for key in common:
        a, b = points_a[key], points_b[key]
        efficiency_a, efficiency_b = _efficiency(first, a), _efficiency(second, b)
        token_ratio = b.first.step_tokens / a.first.step_tokens
        pairs.append(Pair(a, b, ratio(a.step_time, b.step_time, token_ratio),
                          (efficiency_a, efficiency_b) if efficiency_a and efficiency_b else None))
    only_in = (tuple(point.name for key, point in points_a.items() if key not in points_b),
               tuple(point.name for key, point in points_b.items() if key not in points_a))
    settings = _differences(first, second, [(points_a[key].name, points_b[key].name) for key in common])
    for pair in pairs:
        batch_a, batch_b = (f"{point.first.global_batch} x {point.first.block_size}"
                            for point in (pair.first, pair.second))
        if batch_a != batch_b:
            settings[f"tokens per step at {pair.first.name}"] = (batch_a, batch_b)
    return Comparison((first.name, second.name), tuple(pairs), only_in, settings)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of the common points and of the differing settings."""
    a, b = comparison.names
    rows = []
    for pair in comparison.pairs:
        shares = [f"{share.value:.1%}" for share in pair.efficiencies] if pair.efficiencies else ["-", "-"]
        rows.append((pair.first.name,
                     *(format_number(point.tokens_per_second) for point in (pair.first, pair.second)),
                     f"{pair.speed_ratio.value:.1%}", interval_text(pair.speed_ratio), *shares, pair.verdict))
    tables = [Table(f"A: {a}\nB: {b}", ("point", "A tok/s", "B tok/s", "B / A", f"{CONFIDENCE:.0%} interval",
                                        "A effic.", "B effic.", "B is"), tuple(rows), comparison_notes(comparison))]
    if comparison.differences:
        tables.append(Table("Differences", ("setting", "A", "B"), tuple(
            (name, *values) for name, values in comparison.differences.items())))
    return tables


def comparison_notes(comparison: Comparison) -> tuple[str, ...]:
    """Return the notes on a comparison."""
    notes = [f"only in {name}: {', '.join(points)}"
             for name, points in zip(comparison.names, comparison.only_in, strict=True) if points]
    if any(pair.speed_ratio.basis == "steps" for pair in comparison.pairs):
        notes.append(STEPS_ONLY)
    if (settings := len(comparison.differences.keys() - {"command"})) > 1:
        notes.append(f"the studies differ in {settings} settings, so a difference in their results has no single "
                     "cause")
    return tuple(notes)


def _key(point: Measured) -> tuple[str, str, int, int]:
    return point.mode, point.ds_config, point.nodes, point.ranks


def _efficiency(findings: Findings, point: Measured) -> Estimate | None:
    curve = next((curve for curve in findings.curves if any(measured is point for measured in curve.points)), None)
    return curve.efficiency(point) if curve and point is not curve.base else None


def _differences(first: Findings, second: Findings, names: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the settings that differ at common points, with the values of the first pair that differs."""
    differences: dict[str, tuple[str, str]] = {}
    command_a, command_b = " ".join(first.typed), " ".join(second.typed)
    if command_a != command_b:
        differences["command"] = (command_a, command_b)
    for name_a, name_b in names:
        a, b = (origins[name].environment if name in origins else {} for origins, name in
                ((first.provenance, name_a), (second.provenance, name_b)))
        for key in dict.fromkeys((*a, *b)):
            values = (a.get(key, "-"), b.get(key, "-"))
            if values[0] != values[1] and key not in _IGNORED:
                differences.setdefault(key, values)
    return differences
