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
from ezpz_llm.scaling.findings import Findings, find
from ezpz_llm.scaling.fit import FORMULA, Fit
from ezpz_llm.scaling.page import findings_page
from ezpz_llm.scaling.study import SPLIT
from ezpz_llm.scaling.superlinear import explain_superlinear
from ezpz_llm.scaling.tables import sections, study_notes


def report(folder: Path, at: Sequence[int] = ()) -> None:
    """Print the report of a study, and write report.json, report.csv and report.html to its folder.

    Without matplotlib, it writes no page.

    Raises:
        UserError: as in findings.find, or a file cannot be written.
    """
    findings = find(folder, at)
    print(findings_text(findings, terminal_width(), color=wants_color()))
    write_file(folder / "report.json", json.dumps(as_record(findings), indent=2) + "\n")
    write_file(folder / "report.csv", _as_csv(findings))
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
        "ezpz-llm scale report runs/scale-20261122-011944 --at 16,32",), description=(
        "Report the results of a finished or running study: tables, an extrapolation, and an HTML page."))
    parser.add_argument("study", type=Path, metavar="STUDY", help="folder of the study")
    parser.add_argument("--at", type=_parse_sizes, default=(), metavar="LIST",
                        help="numbers of nodes or ranks to extrapolate to, such as 16,32 (default: twice and four "
                             "times the largest measured)")
    options = parser.parse_args(argv)
    report(options.study, options.at)
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
        "fits": [_fit_record(fit, findings) for fit in findings.fits],
        "not_extrapolated": list(findings.not_extrapolated),
    }


def _as_csv(findings: Findings) -> str:
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
    row |= {"point": point.name, "mode": point.mode, "ds_config": point.ds_config, "nodes": point.nodes,
            "ranks": point.ranks, "runs": len(point.good), "runs_failed": len(point.repeats) - len(point.good),
            "global_batch": repeat.global_batch, "micro_batch": repeat.micro_batch,
            "accumulation": repeat.accumulation, "block_size": repeat.block_size,
            "remark": "; ".join(point.errors) or None}
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


def _fit_record(fit: Fit, findings: Findings) -> dict[str, Any]:
    curve = fit.curve
    return {
        "mode": curve.mode, "ds_config": curve.ds_config, "unit": curve.unit, "formula": FORMULA,
        "single_s": fit.single, "limit_s": fit.limit, "doubling_s": fit.doubling, "residual": fit.residual,
        "extrapolations": [{"size": at.size, "ranks": at.ranks, "step_time_s": at.seconds,
                            "tokens_per_second": at.tokens_per_second, "efficiency": at.efficiency}
                           for at in findings.extrapolations if at.fit is fit],
    }


def findings_text(findings: Findings, width: int, *, color: bool) -> str:
    """Return the results as text for a terminal, with escape codes only if `color`."""
    text = f"Study {findings.name}\n" + _wrapped(study_notes(findings), width)
    for section in sections(findings):
        for part in section.tables:
            text += "\n" + (table(part.title, part.columns, part.rows, rich=color) if part.columns else "")
            text += _wrapped(part.notes, width)
        if section.curves:
            text += "\n" + _efficiency_plot(section.curves, width, color=color)
    return text


def _efficiency_plot(curves: Sequence[Curve], width: int, *, color: bool) -> str:
    """Plot the efficiency of the curves of one mode, each with its letter."""
    drawn, keys = [], []
    for i, curve in enumerate(curves):
        letter = LETTERS[i % len(LETTERS)]
        drawn.append(PlotCurve(curve.name, [curve.size(point) for point in curve.points],
                               [100 * curve.efficiency(point).value for point in curve.points], mark=letter,
                               color=COLORS[i % len(COLORS)] if color and len(curves) > 1 else -1))
        keys.append(f"  {letter} {curve.name}\n")
    return curves_plot(drawn, f"{curves[0].mode} scaling: efficiency", curves[0].unit, "%", width,
                       color=color) + "".join(keys)


def _wrapped(sentences: Iterable[str], width: int) -> str:
    return "".join(textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="    ",
                                 break_long_words=False, break_on_hyphens=False) + "\n" for sentence in sentences)
