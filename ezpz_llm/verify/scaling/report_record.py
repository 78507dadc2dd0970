"""Types of report.json and of the lines of report.csv (no torch)."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Curve, Measured
from ezpz_llm.verify.scaling.findings import Findings
from ezpz_llm.verify.scaling.fit import FORMULA, Extrapolation, Fit
from ezpz_llm.verify.scaling.study import SPLIT, Provenance, Repeat


class Row(Struct, frozen=True):
    """Results of a point. Times are in seconds and memory in bytes; efficiency and MFU are fractions."""

    point: str
    mode: str
    ds_config: str
    nodes: int
    ranks: int
    runs: int
    runs_failed: int
    global_batch: int
    micro_batch: int
    accumulation: int
    block_size: int
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    step_median_s: float | None = None
    step_10_percent_s: float | None = None
    step_90_percent_s: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    interval_basis: str | None = None
    mfu: float | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    compute_s: float | None = None
    exposed_communication_s: float | None = None
    data_s: float | None = None
    optimizer_s: float | None = None
    other_s: float | None = None
    slowest_rank: int | None = None
    slowest_host: str | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    remark: str | None = None
    origin: Provenance | None = None


COLUMNS = Row.__struct_fields__[:-1]
"""Columns of report.csv: all fields of `Row` except the origin."""


class CurveRecord(Struct, frozen=True):
    """Curve, with the names of its points."""

    mode: str
    ds_config: str
    unit: str
    points: list[str]
    notes: list[str]


class ExtrapolationRecord(Struct, frozen=True):
    """Extrapolation of a fit to one size."""

    size: int
    ranks: int
    step_time_s: float
    tokens_per_second: float
    efficiency: float


class FitRecord(Struct, frozen=True):
    """Fit of a curve; see `ezpz_llm.verify.scaling.fit.Fit`."""

    mode: str
    ds_config: str
    unit: str
    formula: str
    single_s: float
    limit_s: float
    doubling_s: float
    residual: float
    extrapolations: list[ExtrapolationRecord]


class ReportRecord(Struct, frozen=True):
    """Content of report.json."""

    study: str
    typed: list[str]
    notes: list[str]
    confidence: float
    runs_missing: int
    points: list[Row]
    curves: list[CurveRecord]
    failed: list[Repeat]
    fits: list[FitRecord]
    not_extrapolated: list[str]


def report_record(findings: Findings) -> ReportRecord:
    """Return the content of report.json."""
    curve_of = {id(point): curve for curve in findings.curves for point in curve.points}
    return ReportRecord(
        study=findings.name, typed=list(findings.typed), notes=list(findings.notes), confidence=CONFIDENCE,
        runs_missing=findings.missing,
        points=[_row(point, curve_of.get(id(point)), findings.provenance.get(point.name))
                for point in findings.points],
        curves=[CurveRecord(curve.mode, curve.ds_config, curve.unit, [point.name for point in curve.points],
                            list(curve.notes)) for curve in findings.curves],
        failed=[repeat for point in findings.points for repeat in point.repeats if repeat.error is not None],
        fits=[_fit_record(fit, findings.extrapolations) for fit in findings.fits],
        not_extrapolated=list(findings.not_extrapolated))


def _row(point: Measured, curve: Curve | None, origin: Provenance | None) -> Row:
    repeat = point.first
    row = Row(point.name, point.mode, point.ds_config, point.nodes, point.ranks, len(point.good),
              len(point.repeats) - len(point.good), repeat.global_batch, repeat.micro_batch, repeat.accumulation,
              repeat.block_size, remark="; ".join(point.errors) or None, origin=origin)
    if not point.good:
        return row
    time, steps, split = point.step_time, point.steps, point.split or {}
    low, high = time.interval or (None, None)
    rank, hostname, _ = point.slowest
    row = replace(
        row, step_time_s=time.value, step_time_low_s=low, step_time_high_s=high, step_median_s=steps.median,
        step_10_percent_s=steps.low, step_90_percent_s=steps.high, tokens_per_second=point.tokens_per_second,
        tokens_per_second_per_device=point.tokens_per_second_per_device, mfu=point.mfu,
        peak_device_bytes=point.peak_device_bytes, peak_host_bytes=point.peak_host_bytes,
        **{f"{part}_s": split.get(part) for part in SPLIT}, slowest_rank=rank, slowest_host=hostname,
        first_loss=repeat.first_loss, last_loss=repeat.last_loss)
    if curve is None:
        return row
    efficiency = curve.efficiency(point)
    low, high = efficiency.interval or (None, None)
    remarks = [*point.errors, *([note] if (note := curve.superlinear_note(point)) else [])]
    return replace(row, speed_up=curve.speed_up(point), efficiency=efficiency.value, efficiency_low=low,
                   efficiency_high=high, interval_basis=efficiency.basis, remark="; ".join(remarks) or None)


def _fit_record(fit: Fit, extrapolations: tuple[Extrapolation, ...]) -> FitRecord:
    curve = fit.curve
    return FitRecord(
        curve.mode, curve.ds_config, curve.unit, FORMULA, single_s=fit.single, limit_s=fit.limit,
        doubling_s=fit.doubling, residual=fit.residual,
        extrapolations=[ExtrapolationRecord(at.size, at.ranks, at.seconds, at.tokens_per_second, at.efficiency)
                        for at in extrapolations if at.fit is fit])
