"""Findings of a study, and of two side by side, as tables with notes, for the terminal and the page (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.scaling.efficiency import CONFIDENCE, Curve, Estimate, Measured, ratio
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.fit import TERMS, Fit, explain_predicted, explain_superlinear
from ezpz_llm.scaling.study import SPLIT

STEPS_ONLY = "*: one run only, so that its interval leaves out what differs from run to run"

_USELESS = 10
"""The upper end of an interval over its lower end from which on it says nothing."""


@dataclass(frozen=True)
class Table:
    """Text in rows, the first column names them; below them notes, sentences. Without columns notes alone."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading with tables; `curves` are those to be drawn beside them, `points` those whose split is."""

    heading: str
    tables: tuple[Table, ...]
    curves: tuple[Curve, ...] = ()
    points: tuple[Measured, ...] = ()


def sections(findings: Findings) -> list[Section]:
    """Everything that a study says, in the order in which it is read."""
    found = []
    for mode in ("weak", "strong"):
        if curves := tuple(curve for curve in findings.curves if curve.mode == mode):
            found.append(Section(f"{mode.capitalize()} scaling", tuple(map(curve_table, curves)), curves))
    if findings.contests:
        found.append(Section("Layouts compared", tuple(map(contest_table, findings.contests))))
    measured = tuple(point for point in findings.points if point.good)
    found.append(Section("Step-time breakdown", (split_table(measured),), points=measured))
    if findings.extrapolations:
        found.append(Section("Beyond what was measured", tuple(
            one for extrapolation in findings.extrapolations for one in extrapolation_tables(extrapolation))))
    failed = tuple((one.point, str(one.repeat), one.error, one.run_dir)
                   for point in findings.points for one in point.repeats if one.error is not None)
    if failed:
        found.append(Section("Failed runs", (Table("Failed runs", ("point", "run", "why", "directory"), failed),)))
    return found


def curve_table(curve: Curve) -> Table:
    """Speed and efficiency of a curve's points."""
    strong = curve.mode == "strong"
    columns = (*_sizes(curve), "runs", "step ms", "10-90 %", "tok/s", "tok/s/dev",
               *(("speed-up",) if strong else ()), "efficiency", f"{CONFIDENCE:.0%} interval")
    rows = []
    for point in curve.points:
        efficiency = curve.efficiency(point)
        rows.append((*_size(curve, point), *_speed(point), *((f"{curve.speed_up(point):.2f}",) if strong else ()),
                     f"{efficiency.value:.1%}", "baseline" if point is curve.base else interval_text(efficiency)))
    return Table(title_of(curve), columns, tuple(rows), curve_notes(curve))


def title_of(curve: Curve) -> str:
    """Return the curve's title: what was held fixed."""
    one = curve.base.first
    fixed = (f"{one.global_batch / curve.base.ranks:g} sequences a step and device" if curve.mode == "weak" else
             f"{one.global_batch} sequences a step")
    mode, tokens = curve.mode.capitalize(), one.block_size
    return f"{mode} scaling, {curve.ds_config}: {fixed} at every size, of {tokens} tokens"


def split_table(points: Sequence[Measured]) -> Table:
    """Table of the step-time breakdown, memory and the slowest rank."""
    rows = []
    for point in points:
        split = point.split
        rank, host, times = point.slowest
        total = sum(split.values()) if split else 0.0
        rows.append((point.name, *(f"{split[part] * 1e3:.1f}" if split else "-" for part in SPLIT),
                     f"{split['exposed_communication'] / total:.0%}" if total else "-",
                     f"{point.mfu:.1%}" if point.mfu is not None else "-", _memory(point.peak_device_bytes),
                     _memory(point.peak_host_bytes), f"{rank} {host} ({times}/{len(point.good)})"))
    return Table("Where a step goes (ms of the mean rank in the traced steps; times and rates above leave these "
                 "out)", ("point", "compute", "exposed", "data", "optim.", "other", "exp. %", "MFU", "device GiB",
                  "host GiB", "slowest rank"), tuple(rows))


def contest_table(contest: Sequence[Measured]) -> Table:
    """Layouts at one size, each against the fastest."""
    best = contest[0]
    rows = []
    for point in contest:
        share = ratio(best.step_time, point.step_time, point.first.step_tokens / best.first.step_tokens)
        rows.append((point.ds_config, *_speed(point), f"{point.mfu:.1%}" if point.mfu is not None else "-",
                     _memory(point.peak_device_bytes), _memory(point.peak_host_bytes), f"{share.value:.1%}",
                     "-" if point is best else interval_text(share)))
    size = f"{best.ranks} rank(s) on {best.nodes} node(s) ({best.mode})"
    batches = {point.first.step_tokens for point in contest}
    held = f"{best.first.global_batch} sequences a step" if len(batches) == 1 else "each with a batch of its own"
    return Table(f"Layouts on {size}, {held}", (
        "layout", "runs", "step ms", "10-90 %", "tok/s", "tok/s/dev", "MFU", "device GiB", "host GiB",
        "of fastest", f"{CONFIDENCE:.0%} interval"), tuple(rows),
        (STEPS_ONLY,) * any(point.step_time.basis == "steps" for point in contest))


def extrapolation_tables(extrapolation: Extrapolation) -> list[Table]:
    """The fit of a layout, and the sizes that were not measured, with what is to be known of them."""
    notes, fit = tuple(fit_notes(extrapolation)), extrapolation.fit
    if fit is None:
        return [Table("", (), (), notes)]
    targets = tuple(f"{target.curve.name}: {target.describe()}" for target in extrapolation.targets)
    if not extrapolation.predictions:
        return [replace(fit_table(extrapolation.ds_config, fit), notes=(*notes, *targets))]
    rows = tuple((one.curve.name, f"{one.size} {one.curve.unit}", str(one.ranks), f"{one.seconds * 1e3:.1f}",
                  _band(one.seconds_band, 1e3, ".1f"), short_number(one.tokens_per_second), f"{one.efficiency:.1%}",
                  _band(one.efficiency_band, 100, ".1f")) for one in extrapolation.predictions)
    title = f"By the fit of {extrapolation.ds_config}, with bands of {CONFIDENCE:.0%} for the mean over runs"
    columns = ("curve", "size", "ranks", "step ms", "band", "tok/s", "efficiency", "band %")
    return [replace(fit_table(extrapolation.ds_config, fit), notes=notes), Table(title, columns, rows, targets)]


def fit_table(ds_config: str, fit: Fit) -> Table:
    """The best model term by term at each point, against what was measured."""
    names = [name for name in ("work", "bubble", *TERMS[1:]) if any(name in row.parts for row in fit.rows)]
    rows = [(row.point.name, *(f"{row.parts.get(name, 0.0) * 1e3:.1f}" for name in names),
             f"{row.seconds * 1e3:.1f}", f"{row.measured * 1e3:.1f}", f"{row.deviation:+.1%}") for row in fit.rows]
    return Table(f"Fit of the step time of {ds_config} (ms)",
                 ("point", *names, "sum", "measured", "deviation"), tuple(rows))


def fit_notes(extrapolation: Extrapolation) -> list[str]:
    """Notes on a fit: its error, what it cannot tell, and what else would fit."""
    fit = extrapolation.fit
    if fit is None:
        return [f"{extrapolation.ds_config}: {extrapolation.why}"]
    tested = f"{fit.error:.1%} from the points (root mean square)" if fit.free else \
        "as many terms as points, so that nothing tests the form"
    notes = [f"the fit is {tested}; the points' own error is {fit.noise:.1%}"]
    modes = {curve.mode for curve in fit.curves}
    if len(modes) == 1:
        both = "a serial part and the work of a device" if modes == {"weak"} else "a serial part and bandwidth"
        notes.append(f"{modes.pop()} scaling alone does not tell {both} apart; --mode both does")
    if fit.rivals:
        others = "; ".join(" + ".join(terms) for terms in fit.rivals[:3])
        more = f", and {len(fit.rivals) - 3} more" if len(fit.rivals) > 3 else ""
        notes.append(f"these points support as well: {others}{more}. The band holds them all")
    notes += [f"{one.curve.name} at {one.size} {one.curve.unit}: {one.efficiency:.1%} is above 100 %: {why}"
              for one in extrapolation.predictions if (why := explain_predicted(fit, one))]
    return [*notes, *extrapolation.refused]


def interval_text(estimate: Estimate) -> str:
    """An interval in percent, with a mark where it is of the steps of one run."""
    if estimate.interval is None:
        return "not known"
    if estimate.interval[1] > _USELESS * estimate.interval[0]:
        return "too wide to tell"
    return _band(estimate.interval, 100, ".1f") + ("*" if estimate.basis == "steps" else "")


def _band(band: tuple[float, float], scale: float, form: str) -> str:
    return f"{band[0] * scale:{form}} to {band[1] * scale:{form}}"


def _sizes(curve: Curve) -> tuple[str, ...]:
    return ("nodes", "ranks") if curve.unit == "nodes" else ("ranks",)


def _size(curve: Curve, point: Measured) -> tuple[str, ...]:
    return (str(point.nodes), str(point.ranks)) if curve.unit == "nodes" else (str(point.ranks),)


def _speed(point: Measured) -> tuple[str, ...]:
    steps = point.steps
    good, asked = len(point.good), len(point.repeats)
    return (str(good) if good == asked else f"{good}/{asked}", f"{point.step_time.value * 1e3:.1f}",
            _band((steps.low, steps.high), 1e3, ".1f"), short_number(point.tokens_per_second),
            short_number(point.tokens_per_second_per_device))


def _memory(value: int | None) -> str:
    return f"{value / 2**30:.2f}" if value else "-"


def curve_notes(curve: Curve) -> tuple[str, ...]:
    """Notes of a curve; every efficiency above 100 % with its causes."""
    above = [f"{point.name}: {curve.efficiency(point).value:.1%} is above 100 %: {'; '.join(causes)}"
             for point in curve.points if (causes := explain_superlinear(curve, point))]
    is_marked = any(curve.efficiency(point).basis == "steps" for point in curve.points)
    return (*curve.notes, *above, *([STEPS_ONLY] if is_marked else []))


def study_notes(findings: Findings) -> list[str]:
    """Notes of the whole study."""
    left = f"{findings.missing} run(s) are still to be made: ezpz-llm scale --study continues them"
    return [*findings.notes, *([left] if findings.missing > 0 else [])]


# Two studies side by side: the same points of both, and what else is different.
_NO_BEARING = ("EZPZ_LLM_RUN_DIR", "EZPZ_LLM_RUN_ID", "EZPZ_LLM_SECRET", "EZPZ_LLM_ENDS_AT",
               "EZPZ_LLM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
        efficiencies = (_efficiency(first, one), _efficiency(second, other))
        work = other.first.step_tokens / one.first.step_tokens
        pairs.append(Pair(one, other, ratio(one.step_time, other.step_time, work),
                          efficiencies if all(efficiencies) else None))
    alone = tuple(tuple(point.name for key, point in mine.items() if key not in yours)
                  for mine, yours in ((ours, theirs), (theirs, ours)))
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
