"""Plot loss and throughput of one or more runs, in the terminal and as an HTML page."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, escape_control_characters, print_lines, require_package
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.rundir import WITH_STEPS, newest_run, write_file
from ezpz_llm.training.observe.history import steady_steps
from ezpz_llm.training.observe.plots import COLORS, LETTERS, POINTS, Curve, curves_plot
from ezpz_llm.training.observe.tables import table
from ezpz_llm.training.observe.terminal import terminal_width, wants_color
from ezpz_llm.training.report.runs import (
    RESULTS,
    Run,
    comparison_sentence,
    differences,
    load_runs,
    remarks,
    result_row,
)

_IF_NO_RUN = "ezpz-llm report RUN_DIR; ezpz-llm why shows how a run without steps ended"
_MAX_VALUE_LENGTH = 31  # characters of a setting's value

_MAX_RUNS = len(LETTERS)
"""Maximum number of runs in a plot."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: a directory is not a run directory, no run has a step, there are too many runs, or a file cannot
            be written.
    """
    parser = CommandParser("report", description=__doc__, shown=(
        "ezpz-llm report  the newest run",
        "ezpz-llm report runs/a runs/b --html page.html"))
    parser.add_argument("run_dir", nargs="*", type=Path, metavar="RUN_DIR",
                        help="finished or running runs (default: the newest in runs/ with a step)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML page")
    parser.add_argument("--figures", type=Path, metavar="DIR",
                        help="also write the page's figures as PDF, SVG and PNG, for publications")
    options = parser.parse_args(argv)
    if options.html or options.figures:
        require_package("matplotlib", "a figure", "figures", "--html" if options.html else "--figures")
    runs = load_runs(options.run_dir or [newest_run(Path("runs"), WITH_STEPS, _IF_NO_RUN).path])
    if not any(len(run.rows) for run in runs):
        where = ", ".join(str(run.path) for run in runs)
        if all(run.record.exit for run in runs):
            raise UserError("the run wrote no steps", where=where,
                            instead="ezpz_llm.record(step, loss=…) in the script, or lines in metrics.jsonl "
                                    "(docs/use/your_own_script.md); ezpz-llm why shows how the run ended")
        raise UserError("no step has been written yet", where=where,
                        instead="the same command after the first progress line, or ezpz-llm why if there is no "
                                "such line")
    if len(runs) > _MAX_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one plot", instead=f"at most {_MAX_RUNS}")
    color = wants_color()
    print_lines(report_text(runs, terminal_width(), color=color), keeps_colors=color, end="")
    if options.html:
        from ezpz_llm.training.report.run_page import report_page

        write_file(options.html, report_page(runs), "--html")
        print_lines(f"\npage: {options.html}")
    if options.figures:
        from ezpz_llm.training.report.figures import write_figures
        from ezpz_llm.training.report.run_page import report_figures

        print_lines("\nfigures: " + ", ".join(map(str, write_figures(options.figures, report_figures(runs)))))
    return 0


def report_text(runs: Sequence[Run], width: int, *, color: bool) -> str:
    """Return the report as text, with escape codes only if `color`."""
    differing = differences(runs)
    parts = [_results([result_row(run) for run in runs], width, color),
             "".join(_wrapped(f"{name}: {text}", width) for name, text in remarks(runs))]
    if len(runs) > 1:
        columns = ("setting", *(run.name for run in runs))
        rows = [[name, *(_abbreviate(value) for value in values)]
                for name, values in differing.items()]
        parts.append((table("Differences", columns, rows) if differing else "")
                     + _wrapped(comparison_sentence(differing), width))
    parts.append(_plot(runs, "loss", "loss", "nats/token", width, color))
    if any(run.rows.finite("tokens_per_second") for run in runs):
        parts.append(_plot(runs, "tokens_per_second", "tokens/s", "", width, color))
    return "\n".join(parts)


def _results(rows: Sequence[Sequence[str]], width: int, color: bool) -> str:
    """Format the runs as a table, or as paragraphs if the table is wider than `width`."""
    widths = [max(map(len, column)) for column in zip(RESULTS, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) < width:
        return table("Runs", RESULTS, rows, rich=color)
    lines = ["Runs"]
    for name, *values in rows:
        results = (f"{label} {value}" for label, value in zip(RESULTS[1:], values, strict=True) if value != "-")
        lines += [f"  {escape_control_characters(name)}",
                  textwrap.fill(", ".join(results), width, initial_indent=" " * 4,
                                subsequent_indent=" " * 4)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(escape_control_characters(text), width, subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False) + "\n"


def _abbreviate(value: str) -> str:
    half = _MAX_VALUE_LENGTH // 2
    return value if len(value) <= _MAX_VALUE_LENGTH else f"{value[:half]}…{value[-half:]}"


def _plot(runs: Sequence[Run], metric: str, title: str, unit: str, width: int, color: bool) -> str:
    """Plot a metric over tokens, or over steps if a run has no token counts.

    Throughput is plotted without the first and last steps, which would dominate the scale.
    """
    drawn = [run for run in runs if len(run.rows)]
    by_tokens = all(run.tokens[-1] > 0 for run in drawn)
    several, timed = len(drawn) > 1, metric != "loss"
    curves = []
    for i, run in enumerate(drawn):
        position = [tokens / 1e6 for tokens in run.tokens] if by_tokens else run.column("step")
        x, y = (steady_steps(values) if timed else values for values in (position, run.column(metric)))
        curves.append(Curve(escape_control_characters(run.name), x, y,
                            mark=LETTERS[i] if several and not color else "",
                            color=COLORS[i % len(COLORS)] if several else -1))
    if not several and not timed and drawn[0].validation:
        curves.append(Curve("validation", curves[0].x, drawn[0].column("val_loss"), mark=POINTS))
        title += f", {POINTS}: validation"
    text = curves_plot(curves, title, "million tokens" if by_tokens else "step", unit, width, color=color,
                       reduce=statistics.median if timed else statistics.fmean)
    if not several:
        return text
    keys = (f"\x1b[38;5;{curve.color}m━━\x1b[0m {curve.name}" if color else f"{curve.mark} {curve.name}"
            for curve in curves)
    return text + "".join(f"  {key}\n" for key in keys)
