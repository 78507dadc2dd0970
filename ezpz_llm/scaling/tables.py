"""Findings of a study as tables with notes, for the terminal and the page (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ezpz_llm.base import counted
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.observe.tables import Table
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.scaling.efficiency import CONFIDENCE, Curve, Estimate, Measured, ratio
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.fit import TERMS, Fit, explain_predicted, explain_superlinear
from ezpz_llm.scaling.study import SPLIT

STEPS_ONLY = "*: one run only, so that its interval leaves out what differs from run to run"

_USELESS = 10
"""The upper end of an interval over its lower end from which on it says nothing."""


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
                     f"{split['exposed_communication'] / total:.0%}" if split and total else "-",
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
    size = f"{counted(best.ranks, 'rank')} on {counted(best.nodes, 'node')} ({best.mode})"
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
    left = f"{counted(findings.missing, 'run')} left to do: {typable('ezpz-llm scale --study D')} continues them"
    return [*findings.notes, *([left] if findings.missing > 0 else [])]
