"""Figures fit for a paper, by matplotlib (the extra `figures`): each drawing as PDF, SVG and PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import cache_dir, import_package
from ezpz_llm.observe.history import steady
from ezpz_llm.observe.plots import downsample
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.report.runs import Run
from ezpz_llm.rundir import write_file

COLUMN, PAGE = 3.35, 6.9
"""Inches of one column of a two-column page, and of both."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart by the colour-blind (Okabe and Ito 2008); markers and dashes differ as well, for print in grey."""
MARKERS = "osD^vPX"
_STYLE = {"font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
          "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
          "grid.linewidth": 0.5, "lines.linewidth": 1.2, "lines.markersize": 4, "legend.frameon": False,
          "pdf.fonttype": 42, "svg.hashsalt": "ezpz_llm"}
"""Letters of a caption's size; fonts that journals accept (no Type 3); the same bytes for the same drawing."""
_WITHOUT_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
_HEIGHT, _DOTS_PER_INCH, _POINTS = 0.72, 300, 1000


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what draws on it, and its labels."""

    draw: Callable[[Any], None]
    x_label: str
    y_label: str


def write_figure(folder: Path, name: str, panels: Sequence[Panel], width: float) -> list[Path]:
    """Draw panels side by side, and write `name`.pdf, .svg and .png into a folder.

    Args:
        width: of all of it, in inches.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    # Its cache of fonts belongs with ours.
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))
    matplotlib = import_package("matplotlib", "a figure", "figures")
    figures = import_package("matplotlib.figure", "a figure", "figures")
    written = []
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(width, _HEIGHT * width / len(panels)), layout="constrained")
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            panel.draw(axes)
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
        for form, metadata in _WITHOUT_DATE.items():
            content = io.BytesIO()
            figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=metadata)
            written.append(folder / f"{name}.{form}")
            write_file(written[-1], content.getvalue())
    return written


def mark(number: int) -> dict[str, Any]:
    """Colour and marker of series number `number`."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


# A report's runs: loss and throughput over tokens.
def write_report_figures(runs: Sequence[Run], folder: Path, width: float = PAGE) -> list[Path]:
    """Loss and tokens a second of runs over tokens, side by side: curves.pdf, .svg and .png.

    Raises:
        UserError: see write_figure.
    """
    def loss(axes: Any) -> None:
        """Training loss of each run over its tokens, validation as points."""
        for i, run in enumerate(runs):
            _curve(axes, run.tokens, run.column("loss"), run.name, i)
            if run.validation:
                axes.plot(run.tokens / 1e6, run.column("val_loss"), linestyle="", label="validation", **mark(i))
        axes.legend()

    def throughput(axes: Any) -> None:
        """Tokens a second of each run's steady steps."""
        for i, run in enumerate(runs):
            _curve(axes, steady(run.tokens), steady(run.column("tokens_per_second")), run.name, i)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))

    return write_figure(folder, "curves", (Panel(loss, "million tokens", "loss (nats a token)"),
                                           Panel(throughput, "million tokens", "tokens a second")), width)


def _curve(axes: Any, x: Any, y: Any, name: str, number: int) -> None:
    dashes = ("-", "--", "-.", ":")[number % 4]
    x, y = downsample(x / 1e6, y, _POINTS)
    axes.plot(x, y, label=name, color=COLOURS[number % len(COLOURS)], linestyle=dashes)
