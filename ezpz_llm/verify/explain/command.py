"""Show where the time of a run went, rank the causes of lost time, and suggest what to try."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import count_noun, escape_control_characters, print_lines, require_package
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.help_pages import wrap_paragraph
from ezpz_llm.core.base.shell_commands import to_typable_text
from ezpz_llm.core.rundir import TRAINING, newest_run, write_file
from ezpz_llm.training.observe.plots import bars_plot
from ezpz_llm.training.observe.tables import Table, table_text
from ezpz_llm.training.observe.terminal import terminal_width, wants_color
from ezpz_llm.training.report.figures import write_figures
from ezpz_llm.verify.explain import tables
from ezpz_llm.verify.explain.diagnosis import Diagnosis, check_sentences, diagnose
from ezpz_llm.verify.explain.page import explain_figures, explain_page


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the directory does not belong to a training run, or a trace cannot be read.
    """
    parser = CommandParser("explain", description=__doc__, shown=(
        "ezpz-llm explain  the newest run",
        "ezpz-llm explain runs/gpt2 --html explain.html",
        "launch -n 2 python3 -m ezpz_llm.train --trace-steps 3  record traces, so that explain can say more"))
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR",
                        help="run directory (default: the newest in runs/ with at least one step)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML page")
    parser.add_argument("--figures", type=Path, metavar="DIR",
                        help="also write the page's figures as PDF, SVG and PNG, for a paper")
    options = parser.parse_args(argv)
    if options.html or options.figures:
        require_package("matplotlib", "a figure", "figures", "--html" if options.html else "--figures")
    run_dir = (options.run_dir or newest_run(Path("runs"), TRAINING, "ezpz-llm explain RUN_DIR").path).absolute()
    diagnosis = diagnose(run_dir)
    if options.json:
        print_lines(json.dumps(diagnosis.as_record(), indent=2))
    else:
        color = wants_color()
        print_lines(_diagnosis_text(diagnosis, terminal_width(), color=color), keeps_colors=color, end="")
    # With --json, standard output must contain only the JSON.
    notes = sys.stderr if options.json else sys.stdout
    if options.html:
        write_file(options.html, explain_page(diagnosis), "--html")
        print_lines(f"\npage: {options.html}", file=notes)
    if options.figures:
        paths = write_figures(options.figures, explain_figures(diagnosis))
        print_lines("\nfigures: " + ", ".join(map(str, paths)), file=notes)
    return 0


def _diagnosis_text(diagnosis: Diagnosis, width: int, *, color: bool) -> str:
    """Format a diagnosis for the terminal: causes first, then the tables with the data."""
    head = f"{diagnosis.run_dir}: layout {diagnosis.layout}, {count_noun(diagnosis.ranks, 'rank')}"
    parts = [escape_control_characters(f"{head}\n\n{_causes(diagnosis)}")]
    if split := diagnosis.split:
        milliseconds = [(name, seconds * 1e3) for name, seconds in tables.mean_step(split).items()]
        steps = count_noun(split.ranks[0].steps, "step")
        parts.append(bars_plot(milliseconds, f"traced step, mean over ranks, ms ({steps})", width, color=color))
    parts += [table_text(table, rich=color) for table in _tables(diagnosis)]
    if sentences := check_sentences(diagnosis.checks):
        parts.append(escape_control_characters("".join(f"  {line}\n" for line in ["Cross-checks with other tools:",
                                                                                  *sentences])))
    if diagnosis.wall:
        parts.append(table_text(tables.run_table(diagnosis.wall), rich=color))
    return "\n".join(parts)


def _causes(diagnosis: Diagnosis) -> str:
    lines = [wrap_paragraph(sentence) + "\n" for sentence in diagnosis.opening]
    lines.append(wrap_paragraph(f"{tables.CAUSES}:"))
    for number, cause in enumerate(diagnosis.shown_causes, 1):
        lines.append(wrap_paragraph(cause.what, f"  {number}. {cause.share:6.1%}  {cause.seconds:8.2f} s  ",
                                    indent=7))
        lines += [wrap_paragraph(to_typable_text(line), "       try: ", indent=12) for line in cause.advice]
    if not diagnosis.shown_causes:
        lines.append(f"  {tables.NO_CAUSE}")
    if diagnosis.missing_traces_note:
        lines.append(wrap_paragraph(diagnosis.missing_traces_note, "  ", indent=2))
    return "\n".join(lines) + "\n"


def _tables(diagnosis: Diagnosis) -> list[Table]:
    if split := diagnosis.split:
        shown = [tables.traced_steps_table(split), *([tables.collectives_table(split)] if split.by_label else []),
                 *([tables.ranks_table(split)] if len(split.ranks) > 1 else [])]
    else:
        shown = [tables.phases_table(diagnosis.phases)]
    if diagnosis.memory:
        shown.append(tables.memory_table(diagnosis.memory))
    return shown
