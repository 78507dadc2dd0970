"""`ezpz-llm scale report STUDY` (text, JSON, CSV, HTML page) and `scale compare A B` (text, JSON)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import asdict

from ezpz_llm.core.base import UserError, escape_control_characters, print_lines, require_package
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.help_pages import typed_name
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_file
from ezpz_llm.training.observe.plots import COLORS, LETTERS, Curve as PlotCurve, curves_plot
from ezpz_llm.training.observe.tables import table, table_text
from ezpz_llm.training.observe.terminal import terminal_width, wants_color
from ezpz_llm.verify.scaling.compare import compare, comparison_tables
from ezpz_llm.verify.scaling.efficiency import Curve, shared_unit
from ezpz_llm.verify.scaling.findings import Findings, find
from ezpz_llm.verify.scaling.page import findings_page
from ezpz_llm.verify.scaling.report_record import COLUMNS, ReportRecord, report_record
from ezpz_llm.verify.scaling.tables import sections, study_notes


def report(folder: Path, at: Sequence[int] = ()) -> None:
    """Print the report of a study, and write report.json, report.csv and report.html to its folder.

    Without matplotlib, it writes no page.

    Raises:
        UserError: as in findings.find, or a file cannot be written.
    """
    findings = find(folder, at)
    color = wants_color()
    print_lines(findings_text(findings, terminal_width(), color=color), keeps_colors=color)
    record = report_record(findings)
    write_file(folder / "report.json", json.dumps(as_plain(record), indent=2) + "\n")
    write_file(folder / "report.csv", _as_csv(record))
    try:
        require_package("matplotlib", "the page", "figures")
    except UserError as error:
        print_lines(f"page: not written: {error.found}: {error.instead}")
    else:
        write_file(folder / "report.html", findings_page(findings))
        print_lines(f"page: {folder / 'report.html'}")
    print_lines(f"numbers: {folder / 'report.csv'}, {folder / 'report.json'}")


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
        print_lines(json.dumps(as_plain(comparison.record()), indent=2))
        return 0
    for comparison_table in comparison_tables(comparison):
        print_lines(table_text(comparison_table, rich=wants_color()), keeps_colors=wants_color())
    return 0


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 16,32") from error


def _as_csv(record: ReportRecord) -> str:
    """Return CSV with COLUMNS and a line per point; unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, record.points))
    return text.getvalue()


def findings_text(findings: Findings, width: int, *, color: bool) -> str:
    """Return the results as text for a terminal, with escape codes only if `color`."""
    text = escape_control_characters(f"Study {findings.name}\n") + _wrapped(study_notes(findings), width)
    for section in sections(findings):
        for part in section.tables:
            text += "\n" + (table(part.title, part.columns, part.rows, rich=color) if part.columns else "")
            text += _wrapped(part.notes, width)
        if section.curves:
            text += "\n" + _efficiency_plot(section.curves, width, color=color)
    return text


def _efficiency_plot(curves: Sequence[Curve], width: int, *, color: bool) -> str:
    """Plot the efficiency of the curves of one mode, each with its letter."""
    drawn, keys, unit = [], [], shared_unit(curves)
    for i, curve in enumerate(curves):
        letter, name = LETTERS[i % len(LETTERS)], escape_control_characters(curve.name)
        drawn.append(PlotCurve(name, [point.size(unit) for point in curve.points],
                               [100 * curve.efficiency(point).value for point in curve.points], mark=letter,
                               color=COLORS[i % len(COLORS)] if color and len(curves) > 1 else -1))
        keys.append(f"  {letter} {name}\n")
    return curves_plot(drawn, f"{curves[0].mode} scaling: efficiency", unit, "%", width,
                       color=color) + "".join(keys)


def _wrapped(sentences: Iterable[str], width: int) -> str:
    return "".join(textwrap.fill(escape_control_characters(sentence), width, initial_indent="  ",
                                 subsequent_indent="    ", break_long_words=False,
                                 break_on_hyphens=False) + "\n" for sentence in sentences)
