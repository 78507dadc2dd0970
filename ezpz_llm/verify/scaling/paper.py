"""`ezpz-llm scale paper STUDY`: figure, LaTeX table and paragraph, with the source of each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.core.base import UserError, count_noun, print_lines, require_package
from ezpz_llm.core.base.command_parser import CommandParser, typed_name
from ezpz_llm.core.rundir import write_file
from ezpz_llm.training.report.figures import COLUMN, PAGE, write_figures
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Curve, Estimate, Measured, shared_unit
from ezpz_llm.verify.scaling.findings import Findings, find
from ezpz_llm.verify.scaling.page import scaling_figure
from ezpz_llm.verify.scaling.tables import STEPS_ONLY

_ESCAPED = str.maketrans({character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"})


def main(argv: Sequence[str]) -> int:
    """Run `scale paper` and return its exit code."""
    parser = CommandParser(prog=f"{typed_name('scale')} paper", shown=(
        "ezpz-llm scale paper runs/scale-20261122-011944",), description=(
        "Write the figure of a study (PDF, SVG, PNG), a table (LaTeX, booktabs) and a paragraph on results and "
        "method, with the source of each number."))
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
    """Write `scaling-MODE`.pdf, .svg, .png and .tex for each mode of a study, and one `paragraph.tex`.

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
    paths.append(folder / "paragraph.tex")
    write_file(paths[-1], "\n\n".join(paragraph(findings, curve) for curve in findings.curves) + "\n")
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


def _efficiency_sentence(efficiency: Estimate) -> str:
    value, level = f"{100 * efficiency.value:.1f}", f"{100 * CONFIDENCE:.0f} %"
    if efficiency.interval is None:
        return f"{value} % (its error is unknown)" if not efficiency.is_too_wide else (
            f"{value} %, with a {level} interval that is too wide to be stated")
    low, high = efficiency.interval
    sample = ", which does not include the variation between runs" if efficiency.basis == "steps" else ""
    return (f"{value} [{100 * low:.1f}, {100 * high:.1f}] % (in brackets the {level} interval by Student's t on "
            f"logarithms{sample})")


def paragraph(findings: Findings, curve: Curve) -> str:
    """Return a paragraph on method and results, each sentence after a comment with the source of its numbers."""
    return "\n".join(f"% {source}\n{sentence.translate(_ESCAPED)}"
                     for source, sentence in _sentences(findings, curve))


def _sentences(findings: Findings, curve: Curve) -> Iterator[tuple[str, str]]:
    base, last = curve.base, curve.points[-1]
    sizes = ", ".join(str(curve.size(point)) for point in curve.points)
    provenance = findings.provenance.get(base.name)
    environment = provenance.environment if provenance else {}
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "deepspeed") if name in environment)
    device = f"devices of type {environment['device']}" if environment.get("device") else ""
    length = base.first.block_size
    batch = (f"{base.first.global_batch / base.ranks:g} sequences of {length} tokens per step and rank"
             if curve.mode == "weak" else
             f"{base.first.global_batch} sequences of {length} tokens per step at every size")
    yield "study.json", (f"We measured {curve.mode} scaling of layout {curve.ds_config} on {sizes} {curve.unit}: "
                         f"{batch}.")
    if versions or device:
        yield f"points/{base.name}/run-*/run.json", (
            f"The runs used {' and '.join(part for part in (device, versions) if part)}.")
    runs = sorted({len(point.good) for point in curve.points})
    if runs == [1]:
        yield "points.jsonl", ("Each size was run once; the step time is the median step time, without the first "
                               "steps.")
    else:
        yield "points.jsonl", (
            f"Each size was run {' to '.join(map(str, runs))} times, in random order; the step time is the "
            "geometric mean over runs of the median step time, without the first steps.")
    speed = f"{last.tokens_per_second:,.0f} tokens per second, {curve.speed_up(last):.2f} times "\
            f"the throughput of {count_noun(curve.size(base), curve.unit[:-1])}"
    yield f"points/{base.name}, points/{last.name}", (
        f"On {curve.size(last)} {curve.unit} training reached {speed}: an efficiency of "
        f"{_efficiency_sentence(curve.efficiency(last))}.")
    if split := last.split:
        share = split["exposed_communication"] / sum(split.values())
        yield f"points/{last.name}/run-*/explain, the traced steps", (
            f"On average over ranks, {100 * share:.0f} % of the step time was exposed communication.")
