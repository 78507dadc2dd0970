"""`ezpz-llm scale paper STUDY`: figure and LaTeX table, with the source of each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.core.base import UserError, print_lines, require_package
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.help_pages import typed_name
from ezpz_llm.core.rundir import write_file
from ezpz_llm.training.report.figures import COLUMN, PAGE, write_figures
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Curve, Measured, shared_unit
from ezpz_llm.verify.scaling.findings import Findings, find
from ezpz_llm.verify.scaling.page import scaling_figure
from ezpz_llm.verify.scaling.tables import STEPS_ONLY

_ESCAPED = str.maketrans({character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"})


def main(argv: Sequence[str]) -> int:
    """Run `scale paper` and return its exit code."""
    parser = CommandParser(prog=f"{typed_name('scale')} paper", shown=(
        "ezpz-llm scale paper runs/scale-20261122-011944",), description=(
        "Write the figure of a study (PDF, SVG, PNG) and a table (LaTeX, booktabs), with the source of each "
        "number."))
    parser.add_argument("study", type=Path, metavar="STUDY", help="folder of the study")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (STUDY/paper)")
    parser.add_argument("--width", type=float, default=PAGE, metavar="INCHES",
                        help=f"width of the figure (%(default)s: two columns; one column is {COLUMN})")
    options = parser.parse_args(argv)
    require_package("matplotlib", "a figure", "figures")
    if not 1 <= options.width <= 30:
        raise UserError(f"the width must be 1 to 30 inches, not {options.width:g}", where="--width",
                        instead=f"{COLUMN} or {PAGE}")
    for path in write_paper(find(options.study), options.out or options.study / "paper", options.width):
        print_lines(path)
    return 0


def write_paper(findings: Findings, folder: Path, width: float = PAGE) -> list[Path]:
    """Write `scaling-MODE`.pdf, .svg, .png and .tex for each mode of a study.

    Raises:
        UserError: no curve has two points yet, matplotlib is not installed, or a file cannot be written.
    """
    if not findings.curves:
        raise UserError(f"study {findings.name} has no layout measured at two sizes", where="STUDY",
                        instead="ezpz-llm scale report STUDY to see what is missing")
    paths = []
    for mode in dict.fromkeys(curve.mode for curve in findings.curves):
        curves = [curve for curve in findings.curves if curve.mode == mode]
        paths += write_figures(folder, [replace(scaling_figure(curves), width=width)])
        paths.append(folder / f"scaling-{mode}.tex")
        write_file(paths[-1], _latex_table(curves))
    return paths


def _latex_table(curves: Sequence[Curve]) -> str:
    """Return a booktabs table; a comment at the end of each row names the point of the study."""
    by_nodes = shared_unit(curves) == "nodes"
    rows = [f"{curve.ds_config.translate(_ESCAPED)} & " + f"{point.nodes} & " * by_nodes + f"{point.ranks} & "
            f"{1e3 * point.step_time.value:.1f} & {point.tokens_per_second:,.0f} & "
            f"{_efficiency_text(curve, point)} & "
            + (f"{100 * point.mfu:.1f}" if point.mfu is not None else "--") + rf" \\ % points/{point.name}"
            for curve in curves for point in curve.points]
    return "\n".join((
        rf"% {curves[0].mode} scaling; efficiency with its {100 * CONFIDENCE:.0f} \% interval",
        r"\begin{tabular}{l" + "r" * (5 + by_nodes) + "}", r"\toprule",
        "layout & " + "nodes & " * by_nodes
        + r"ranks & step (ms) & tokens/s & efficiency (\%) & MFU (\%) \\", r"\midrule",
        *rows, r"\bottomrule", r"\end{tabular}",
        *([f"% {STEPS_ONLY}"] if any(curve.efficiency(point).basis == "steps" for curve in curves
                                     for point in curve.points) else []), ""))


def _efficiency_text(curve: Curve, point: Measured) -> str:
    efficiency = curve.efficiency(point)
    if point is curve.base:
        return "baseline"
    text = f"{100 * efficiency.value:.1f}"
    if interval := efficiency.interval:
        return f"{text} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" + "*" * (efficiency.basis == "steps")
    return f"{text} [{'too wide' if efficiency.is_too_wide else 'unknown'}]"


