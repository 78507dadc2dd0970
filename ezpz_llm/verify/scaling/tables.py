"""Tables and notes of a study, for the terminal and the HTML page (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Curve, Estimate, Measured, ratio
from ezpz_llm.verify.scaling.findings import Findings
from ezpz_llm.verify.scaling.fit import FORMULA, Fit
from ezpz_llm.verify.scaling.study import SPLIT

STEPS_ONLY = "*: only one run, so its interval does not include the variation between runs"


@dataclass(frozen=True)
class Section:
    """Section of a report.

    Attributes:
        curves: curves to plot next to the tables.
        points: points whose step-time breakdown to plot.
    """

    heading: str
    tables: tuple[Table, ...]
    curves: tuple[Curve, ...] = ()
    points: tuple[Measured, ...] = ()


def sections(findings: Findings) -> list[Section]:
    """Return the sections of a report in reading order."""
    report = []
    for mode in ("weak", "strong"):
        if curves := tuple(curve for curve in findings.curves if curve.mode == mode):
            report.append(Section(f"{mode.capitalize()} scaling", tuple(map(_curve_table, curves)), curves))
    if findings.contests:
        report.append(Section("Layouts compared", tuple(map(_contest_table, findings.contests))))
    measured = tuple(point for point in findings.points if point.good)
    report.append(Section("Step-time breakdown", (_split_table(measured),), points=measured))
    if findings.curves:
        report.append(Section("Extrapolation, not measured", (_extrapolation_table(findings),)))
    failed = tuple((repeat.point, str(repeat.repeat), repeat.error, repeat.run_dir)
                   for point in findings.points for repeat in point.repeats if repeat.error is not None)
    if failed:
        report.append(Section("Failed runs", (
            Table("Failed runs", ("point", "run", "error", "directory"), failed),)))
    return report


def _curve_table(curve: Curve) -> Table:
    """Return the table of throughput and efficiency of a curve."""
    by_nodes, is_strong = curve.unit == "nodes", curve.mode == "strong"
    columns = (*(("nodes",) if by_nodes else ()), "ranks", "runs", "step ms", "10-90 %", "tok/s", "tok/s/dev",
               *(("speedup",) if is_strong else ()), "efficiency", f"{CONFIDENCE:.0%} interval")
    rows = []
    for point in curve.points:
        efficiency = curve.efficiency(point)
        rows.append((*((str(point.nodes),) if by_nodes else ()), str(point.ranks), *_speed_cells(point),
                     *((f"{curve.speed_up(point):.2f}",) if is_strong else ()), f"{efficiency.value:.1%}",
                     "baseline" if point is curve.base else interval_text(efficiency)))
    first = curve.base.first
    batch = (f"{first.global_batch} sequences of {first.block_size} tokens per step" if is_strong else
             f"{first.global_batch / curve.base.ranks:g} sequences of {first.block_size} tokens per step and "
             "device")
    title = f"{curve.mode.capitalize()} scaling, {curve.ds_config}: {batch} at every size"
    return Table(title, columns, tuple(rows), _curve_notes(curve))


def _split_table(points: Sequence[Measured]) -> Table:
    """Return the table of step-time breakdown, memory and slowest rank."""
    rows = []
    for point in points:
        split = point.split
        rank, hostname, times = point.slowest
        total = sum(split.values()) if split else 0.0
        rows.append((point.name, *(f"{split[part] * 1e3:.1f}" if split else "-" for part in SPLIT),
                     f"{split['exposed_communication'] / total:.0%}" if split and total else "-",
                     *_resource_cells(point), f"{rank} {hostname} ({times}/{len(point.good)})"))
    return Table("Step-time breakdown (ms, mean over ranks in the traced steps, which the results above exclude)",
                 ("point", "compute", "exposed", "data", "optim.", "other", "exp. %", "MFU", "device GiB",
                  "CPU GiB", "slowest rank"), tuple(rows))


def _contest_table(contest: Sequence[Measured]) -> Table:
    """Return the table of layouts at one size, each relative to the fastest."""
    best = contest[0]
    rows = []
    for point in contest:
        share = ratio(best.step_time, point.step_time, point.first.step_tokens / best.first.step_tokens)
        rows.append((point.ds_config, *_speed_cells(point), *_resource_cells(point), f"{share.value:.1%}",
                     "-" if point is best else interval_text(share)))
    size = f"{count_noun(best.ranks, 'rank')} on {count_noun(best.nodes, 'node')} ({best.mode})"
    batches = {point.first.step_tokens for point in contest}
    batch = f"{best.first.global_batch} sequences per step" if len(batches) == 1 else "with different batches"
    return Table(f"Layouts on {size}, {batch}", (
        "layout", "runs", "step ms", "10-90 %", "tok/s", "tok/s/dev", "MFU", "device GiB", "CPU GiB",
        "of fastest", f"{CONFIDENCE:.0%} interval"), tuple(rows),
        (STEPS_ONLY,) * any(point.step_time.basis == "steps" for point in contest))


def _extrapolation_table(findings: Findings) -> Table:
    """Return the table of extrapolated step times, with the fits and the reasons for missing rows as notes."""
    rows = tuple((at.fit.curve.name, f"{at.size} {at.fit.curve.unit}", str(at.ranks), f"{at.seconds * 1e3:.1f}",
                  format_number(at.tokens_per_second), f"{at.efficiency:.1%}",
                  "-" if at.fit.is_exact else f"{at.fit.residual:.1%}")
                 for at in findings.extrapolations)
    columns = ("curve", "size", "ranks", "step ms", "tok/s", "efficiency", "residual")
    return Table(f"Extrapolation, not measured: {FORMULA}", columns if rows else (), rows,
                 (*map(_fit_note, findings.fits), *findings.not_extrapolated))


def _fit_note(fit: Fit) -> str:
    """Return the terms of a fit and its residual as a sentence."""
    sizes = len(fit.curve.points)
    residual = (f"no residual, because {sizes} sizes determine {sizes} terms" if fit.is_exact else
                f"residual {fit.residual:.1%} (root mean square)")
    return (f"{fit.curve.name}: single {fit.single * 1e3:.1f} ms, limit {fit.limit * 1e3:.1f} ms, doubling "
            f"{fit.doubling * 1e3:.1f} ms; {residual}")


def interval_text(estimate: Estimate) -> str:
    """Format an interval in percent, marked with * if it is from the steps of one run."""
    if estimate.interval is None:
        return "too wide" if estimate.is_too_wide else "unknown"
    return _band(estimate.interval, 100) + ("*" if estimate.basis == "steps" else "")


def _band(band: tuple[float, float], scale: float) -> str:
    return f"{band[0] * scale:.1f} to {band[1] * scale:.1f}"


def _speed_cells(point: Measured) -> tuple[str, ...]:
    steps = point.steps
    good, finished = len(point.good), len(point.repeats)
    return (str(good) if good == finished else f"{good}/{finished}", f"{point.step_time.value * 1e3:.1f}",
            _band((steps.low, steps.high), 1e3), format_number(point.tokens_per_second),
            format_number(point.tokens_per_second_per_device))


def _resource_cells(point: Measured) -> tuple[str, ...]:
    """Return the cells of MFU, device memory and CPU memory."""
    peaks = (point.peak_device_bytes, point.peak_host_bytes)
    return ("-" if point.mfu is None else f"{point.mfu:.1%}",
            *(f"{peak / 2**30:.2f}" if peak else "-" for peak in peaks))


def _curve_notes(curve: Curve) -> tuple[str, ...]:
    """Return the notes of a curve, including those on efficiencies above 100 %."""
    superlinear = [f"{point.name}: {note}" for point in curve.points if (note := curve.superlinear_note(point))]
    is_marked = any(curve.efficiency(point).basis == "steps" for point in curve.points)
    return (*curve.notes, *superlinear, *([STEPS_ONLY] if is_marked else []))


def study_notes(findings: Findings) -> list[str]:
    """Return the notes of the whole study."""
    note = (f"{count_noun(findings.missing, 'run')} left to run; continue with "
            f"{to_typable('ezpz-llm scale --study D')}")
    return [*findings.notes, *([note] if findings.missing > 0 else [])]
