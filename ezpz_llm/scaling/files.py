"""A study's findings as JSON and CSV, in the base units: seconds, tokens, bytes, fractions (no torch)."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from ezpz_llm.scaling.above import explain_above
from ezpz_llm.scaling.efficiency import Curve, Measured
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.interval import CONFIDENCE
from ezpz_llm.scaling.point import SPLIT
from ezpz_llm.scaling.predict import Prediction
from ezpz_llm.scaling.tables import fit_notes

COLUMNS = ("point", "mode", "ds_config", "nodes", "ranks", "runs", "runs_failed", "global_batch", "micro_batch",
           "accumulation", "block_size", "step_time_s", "step_time_low_s", "step_time_high_s", "step_median_s",
           "step_10_percent_s", "step_90_percent_s", "tokens_per_second", "tokens_per_second_per_device",
           "speed_up", "efficiency", "efficiency_low", "efficiency_high", "interval_basis", "mfu",
           "peak_device_bytes", "peak_host_bytes", *(f"{part}_s" for part in SPLIT), "slowest_rank", "slowest_host",
           "first_loss", "last_loss", "remark")


def as_record(findings: Findings) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "study": findings.name, "typed": list(findings.typed), "notes": list(findings.notes),
        "confidence": CONFIDENCE, "runs_missing": findings.missing,
        "points": [{**row, "origin": asdict(findings.origins[row["point"]]) if row["point"] in findings.origins
                    else None} for row in _rows(findings)],
        "curves": [{"mode": curve.mode, "ds_config": curve.ds_config, "unit": curve.unit,
                    "points": [point.name for point in curve.points], "notes": list(curve.notes)}
                   for curve in findings.curves],
        "failed": [asdict(one) for point in findings.points for one in point.repeats if one.error is not None],
        "fits": [_fit(one) for one in findings.extrapolations],
    }


def as_csv(findings: Findings) -> str:
    """One line a point under COLUMNS; empty where a number is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(findings))
    return text.getvalue()


def _rows(findings: Findings) -> list[dict[str, Any]]:
    curve_of = {id(point): curve for curve in findings.curves for point in curve.points}
    return [_row(point, curve_of.get(id(point))) for point in findings.points]


def _row(point: Measured, curve: Curve | None) -> dict[str, Any]:
    one = point.first
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {name: getattr(one, name) for name in COLUMNS[3:5] + COLUMNS[7:11]}
    row |= {"point": point.name, "mode": point.mode, "ds_config": point.ds_config, "runs": len(point.good),
            "runs_failed": len(point.repeats) - len(point.good), "remark": "; ".join(point.errors) or None}
    if not point.good:
        return row
    time, steps, split = point.step_time, point.steps, point.split or {}
    low, high = time.interval or (None, None)
    rank, host, _ = point.slowest
    row |= {"step_time_s": time.value, "step_time_low_s": low, "step_time_high_s": high,
            "step_median_s": steps.median, "step_10_percent_s": steps.low, "step_90_percent_s": steps.high,
            "tokens_per_second": point.tokens_per_second,
            "tokens_per_second_per_device": point.tokens_per_second_per_device, "mfu": point.mfu,
            "peak_device_bytes": point.peak_device_bytes, "peak_host_bytes": point.peak_host_bytes,
            **{f"{part}_s": split.get(part) for part in SPLIT}, "slowest_rank": rank, "slowest_host": host,
            "first_loss": one.first_loss, "last_loss": one.last_loss}
    if curve is None:
        return row
    efficiency = curve.efficiency(point)
    low, high = efficiency.interval or (None, None)
    remarks = [*point.errors, *explain_above(curve, point)]
    return row | {"speed_up": curve.speed_up(point), "efficiency": efficiency.value, "efficiency_low": low,
                  "efficiency_high": high, "interval_basis": efficiency.basis, "remark": "; ".join(remarks) or None}


def _fit(one: Extrapolation) -> dict[str, Any]:
    if one.fit is None:
        return {"ds_config": one.ds_config, "why_not": one.why}
    return {
        "ds_config": one.ds_config, "terms": list(one.fit.terms),
        "rivals": [list(terms) for terms in one.fit.rivals], "error": one.fit.error, "noise": one.fit.noise,
        "degrees_of_freedom": one.fit.free, "notes": fit_notes(one),
        "points": [{"point": row.point.name, "measured_s": row.measured, "fitted_s": row.seconds,
                    "parts_s": row.parts} for row in one.fit.rows],
        "predictions": [_prediction(prediction) for prediction in one.predictions],
        "targets": [{"mode": target.curve.mode, "unit": target.curve.unit, "target": target.target,
                     "size": target.size, "sure": target.sure, "possible": target.possible, "limit": target.limit}
                    for target in one.targets],
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {"mode": one.curve.mode, "unit": one.curve.unit, "size": one.size, "ranks": one.ranks,
            "step_time_s": one.seconds, "step_time_band_s": one.seconds_band,
            "tokens_per_second": one.tokens_per_second, "efficiency": one.efficiency,
            "efficiency_band": one.efficiency_band, "parts_s": one.parts, "beyond_measured": one.beyond}
