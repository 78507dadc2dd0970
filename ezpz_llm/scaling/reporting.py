"""`ezpz-llm scale report STUDY` and `ezpz-llm scale compare A B`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.observe.plots import terminal_width, wants_colour
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import write_atomic
from ezpz_llm.scaling.compare import compare, comparison_remarks, comparison_tables
from ezpz_llm.scaling.files import as_csv, as_record
from ezpz_llm.scaling.findings import DEFAULT_TARGET, find
from ezpz_llm.scaling.page import findings_page
from ezpz_llm.scaling.terminal import findings_text


def report(folder: Path, target: float = DEFAULT_TARGET, at: Sequence[int] = ()) -> None:
    """Print what a study says, and write report.json, report.csv and report.html into its folder.

    Raises:
        UserError: see findings.find; or the files cannot be written.
    """
    findings = find(folder, target, at)
    print(findings_text(findings, terminal_width(), colour=wants_colour()))
    contents = {"report.json": json.dumps(as_record(findings), indent=2) + "\n", "report.csv": as_csv(findings),
                "report.html": findings_page(findings)}
    try:
        for name, content in contents.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise UserError(f"cannot write the report: {os.strerror(error.errno)}", where=str(folder)) from error
    print(f"page: {folder / 'report.html'}\nnumbers: {folder / 'report.csv'}, {folder / 'report.json'}")


def report_main(argv: Sequence[str]) -> int:
    """`scale report`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ezpz-llm scale report", allow_abbrev=False, description=(
        "Say what a study came to, also while it is still running: tables, a fit, a page."))
    parser.add_argument("study", type=Path, metavar="STUDY", help="its folder")
    parser.add_argument("--target", type=float, default=DEFAULT_TARGET, metavar="E",
                        help="up to which size efficiency stays at or above this (%(default)s)")
    parser.add_argument("--at", type=_sizes, default=(), metavar="LIST",
                        help="sizes to predict, 16,32 (default: twice and four times the largest)")
    options = parser.parse_args(argv)
    report(options.study, options.target, options.at)
    return 0


def compare_main(argv: Sequence[str]) -> int:
    """`scale compare`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ezpz-llm scale compare", allow_abbrev=False, description=(
        "Compare the points that two studies have in common."))
    parser.add_argument("studies", type=Path, nargs=2, metavar="STUDY", help="the folders of two studies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    comparison = compare(*(find(folder) for folder in options.studies))
    if options.json:
        print(json.dumps(comparison.as_record(), indent=2))
        return 0
    for one in comparison_tables(comparison):
        print(table(one.title, one.columns, one.rows, rich=wants_colour()))
    for remark in comparison_remarks(comparison):
        print(f"  {remark}")
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 16,32") from error
