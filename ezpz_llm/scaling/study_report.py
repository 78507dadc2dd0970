"""`ezpz-llm scale report STUDY` (text, JSON, CSV, HTML page) and `scale compare A B` (text, JSON)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, require_package
from ezpz_llm.base.command_parser import CommandParser, typed_name
from ezpz_llm.observe.plots import COLORS, LETTERS, Curve as PlotCurve, curves_plot
from ezpz_llm.observe.tables import table, table_text
from ezpz_llm.observe.terminal import terminal_width, wants_color
from ezpz_llm.rundir import write_file
from ezpz_llm.scaling.compare import compare, comparison_tables
from ezpz_llm.scaling.efficiency import CONFIDENCE, Curve, Measured
from ezpz_llm.scaling.findings import DEFAULT_TARGET, Extrapolation, Findings, find
from ezpz_llm.scaling.fit import explain_superlinear, fit_line
from ezpz_llm.scaling.page import findings_page
from ezpz_llm.scaling.study import SPLIT
from ezpz_llm.scaling.tables import fit_notes, sections, study_notes


def report(folder: Path, target: float = DEFAULT_TARGET, at: Sequence[int] = ()) -> None:
    """Print the report of a study, and write report.json, report.csv and report.html to its folder.

    Without matplotlib, it writes no page.

    Raises:
        UserError: as in findings.find, or a file cannot be written.
    """
    findings = find(folder, target, at)
    print(findings_text(findings, terminal_width(), color=wants_color()))
    write_file(folder / "report.json", json.dumps(as_record(findings), indent=2) + "\n")
    write_file(folder / "report.csv", as_csv(findings))
    try:
        require_package("matplotlib", "the page", "figures")
    except UserError as error:
        print(f"page: not written: {error.found}: {error.instead}")
    else:
        write_file(folder / "report.html", findings_page(findings))
        print(f"page: {folder / 'report.html'}")
    print(f"numbers: {folder / 'report.csv'}, {folder / 'report.json'}")


def report_main(argv: Sequence[str]) -> int:
    """Run `scale report` and return its exit code."""
    parser = CommandParser(prog=f"{typed_name('scale')} report", shown=(
        "ezpz-llm scale report runs/scale-20261122-011944 --target 0.9",), description=(
        "Report the results of a finished or running study: tables, a fit, and an HTML page."))
    parser.add_argument("study", type=Path, metavar="STUDY", help="folder of the study")
    parser.add_argument("--target", type=float, default=DEFAULT_TARGET, metavar="E",
                        help="report the largest number of nodes or ranks with at least this efficiency"
                             " (default: %(default)s)")
    parser.add_argument("--at", type=_parse_sizes, default=(), metavar="LIST",
                        help="numbers of nodes or ranks to predict, such as 16,32 (default: twice and four times "
                             "the largest measured)")
    options = parser.parse_args(argv)
    report(options.study, options.target, options.at)
    return 0


def compare_main(argv: Sequence[str]) -> int:
    """Run `scale compare` and return its exit code."""
    parser = CommandParser(prog=f"{typed_name('scale')} compare", shown=(
        "ezpz-llm scale compare runs/scale-a runs/scale-b",), description=(
        "Compare the points that two studies have in common."))
    parser.add_argument("studies", type=Path, nargs=2, metavar="STUDY", help="the folders of two studies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    comparison = compare(*(find(folder) for folder in options.studies))
    if options.json:
        print(json.dumps(comparison.as_record(), indent=2))
        return 0
    for comparison_table in comparison_tables(comparison):
        print(table_text(comparison_table, rich=wants_color()))
    return 0


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 16,32") from error


COLUMNS = ("point", "mode", "ds_config", "nodes", "ranks", "runs", "runs_failed", "global_batch", "micro_batch",
           "accumulation", "block_size", "step_time_s", "step_time_low_s", "step_time_high_s", "step_median_s",
           "step_10_percent_s", "step_90_percent_s", "tokens_per_second", "tokens_per_second_per_device",
           "speed_up", "efficiency", "efficiency_low", "efficiency_high", "interval_basis", "mfu",
           "peak_device_bytes", "peak_host_bytes", *(f"{part}_s" for part in SPLIT), "slowest_rank", "slowest_host",
           "first_loss", "last_loss", "remark")
"""Columns of report.csv. Times are in seconds and memory in bytes; efficiency and MFU are fractions."""


def as_record(findings: Findings) -> dict[str, Any]:
    """Return the results for JSON."""
    return {
        "study": findings.name, "typed": list(findings.typed), "notes": list(findings.notes),
        "confidence": CONFIDENCE, "runs_missing": findings.missing,
        "points": [{**row, "origin": asdict(origin) if (origin := findings.provenance.get(row["point"])) else None}
                   for row in _rows(findings)],
        "curves": [{"mode": curve.mode, "ds_config": curve.ds_config, "unit": curve.unit,
                    "points": [point.name for point in curve.points], "notes": list(curve.notes)}
                   for curve in findings.curves],
        "failed": [asdict(repeat) for point in findings.points for repeat in point.repeats
                   if repeat.error is not None],
        "fits": [_fit_record(extrapolation) for extrapolation in findings.extrapolations],
    }


def as_csv(findings: Findings) -> str:
    """Return CSV with COLUMNS and a line per point; unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(findings))
    return text.getvalue()


def _rows(findings: Findings) -> list[dict[str, Any]]:
    curve_of = {id(point): curve for curve in findings.curves for point in curve.points}
    return [_row(point, curve_of.get(id(point))) for point in findings.points]


def _row(point: Measured, curve: Curve | None) -> dict[str, Any]:
    repeat = point.first
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {name: getattr(repeat, name) for name in COLUMNS[3:5] + COLUMNS[7:11]}
    row |= {"point": point.name, "mode": point.mode, "ds_config": point.ds_config, "runs": len(point.good),
            "runs_failed": len(point.repeats) - len(point.good), "remark": "; ".join(point.errors) or None}
    if not point.good:
        return row
    time, steps, split = point.step_time, point.steps, point.split or {}
    low, high = time.interval or (None, None)
    rank, hostname, _ = point.slowest
    row |= {"step_time_s": time.value, "step_time_low_s": low, "step_time_high_s": high,
            "step_median_s": steps.median, "step_10_percent_s": steps.low, "step_90_percent_s": steps.high,
            "tokens_per_second": point.tokens_per_second,
            "tokens_per_second_per_device": point.tokens_per_second_per_device, "mfu": point.mfu,
            "peak_device_bytes": point.peak_device_bytes, "peak_host_bytes": point.peak_host_bytes,
            **{f"{part}_s": split.get(part) for part in SPLIT}, "slowest_rank": rank, "slowest_host": hostname,
            "first_loss": repeat.first_loss, "last_loss": repeat.last_loss}
    if curve is None:
        return row
    efficiency = curve.efficiency(point)
    low, high = efficiency.interval or (None, None)
    remarks = [*point.errors, *explain_superlinear(curve, point)]
    return row | {"speed_up": curve.speed_up(point), "efficiency": efficiency.value, "efficiency_low": low,
                  "efficiency_high": high, "interval_basis": efficiency.basis, "remark": "; ".join(remarks) or None}


def _fit_record(extrapolation: Extrapolation) -> dict[str, Any]:
    fit = extrapolation.fit
    if fit is None:
        return {"ds_config": extrapolation.ds_config, "why_not": extrapolation.reason}
    return {
        "ds_config": extrapolation.ds_config, "terms": list(fit.terms),
        "rivals": [list(terms) for terms in fit.rivals], "error": fit.error, "noise": fit.noise,
        "degrees_of_freedom": fit.free, "notes": fit_notes(extrapolation),
        "points": [{"point": row.point.name, "measured_s": row.measured, "fitted_s": row.seconds,
                    "parts_s": row.parts} for row in fit.rows],
        "predictions": [{
            "mode": predicted.curve.mode, "unit": predicted.curve.unit, "size": predicted.size,
            "ranks": predicted.ranks, "step_time_s": predicted.seconds, "step_time_band_s": predicted.seconds_band,
            "tokens_per_second": predicted.tokens_per_second, "efficiency": predicted.efficiency,
            "efficiency_band": predicted.efficiency_band, "parts_s": predicted.parts,
            "beyond_measured": predicted.beyond,
        } for predicted in extrapolation.predictions],
        "targets": [{"mode": target.curve.mode, "unit": target.curve.unit, "target": target.target,
                     "size": target.size, "sure": target.sure, "possible": target.possible, "limit": target.limit}
                    for target in extrapolation.targets],
    }


_HEIGHT = 16


def findings_text(findings: Findings, width: int, *, color: bool) -> str:
    """Return the results as text for a terminal, with escape codes only if `color`."""
    text = f"Study {findings.name}\n" + _wrapped(study_notes(findings), width)
    for section in sections(findings):
        for part in section.tables:
            text += "\n" + (table(part.title, part.columns, part.rows, rich=color) if part.columns else "")
            text += _wrapped(part.notes, width)
        if section.curves:
            text += "\n" + efficiency_plot(section.curves, findings.extrapolations, width, color=color)
    return text


def efficiency_plot(curves: Sequence[Curve], extrapolations: Sequence[Extrapolation], width: int, *,
                    color: bool) -> str:
    """Plot the efficiency of the curves of one mode: letters for measurements, lines for fits."""
    fits = {extrapolation.ds_config: extrapolation.fit for extrapolation in extrapolations}
    drawn, keys = [], []
    for i, curve in enumerate(curves):
        curve_color = COLORS[i % len(COLORS)] if color and len(curves) > 1 else -1
        letter = LETTERS[i % len(LETTERS)]
        if fit := fits.get(curve.ds_config):
            fitted = fit_line(fit, curve)
            drawn.append(PlotCurve(curve.name, [size for size, _, _ in fitted],
                                   [100 * mean for _, mean, _ in fitted], color=curve_color))
        drawn.append(PlotCurve(curve.name, [curve.size(point) for point in curve.points],
                               [100 * curve.efficiency(point).value for point in curve.points], mark=letter,
                               color=curve_color))
        keys.append(f"  {letter} {curve.name}: measured" + ("; line: fit" if fit else ""))
    unit = curves[0].unit
    return curves_plot(drawn, f"{curves[0].mode} scaling: efficiency", unit, "%", width, _HEIGHT,
                       color=color) + "".join(f"{key}\n" for key in keys)


def _wrapped(sentences: Iterable[str], width: int) -> str:
    return "".join(textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="    ",
                                 break_long_words=False, break_on_hyphens=False) + "\n" for sentence in sentences)
