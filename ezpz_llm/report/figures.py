"""Figures for publications, with matplotlib (the extra `figures`), as PDF, SVG and PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import cache_dir, import_package
from ezpz_llm.observe.history import steady_steps
from ezpz_llm.observe.plots import downsample
from ezpz_llm.observe.throughput import format_number
from ezpz_llm.report.runs import Run
from ezpz_llm.rundir import write_file

COLUMN, PAGE = 3.35, 6.9
"""Width in inches of a column, and of the full page, in a two-column layout."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can distinguish (Okabe and Ito 2008). Markers and dashes also differ."""
MARKERS = "osD^vPX"
_STYLE = {"font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
          "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
          "grid.linewidth": 0.5, "lines.linewidth": 1.2, "lines.markersize": 4, "legend.frameon": False,
          "pdf.fonttype": 42, "svg.hashsalt": "ezpz_llm"}
"""Caption-size text; TrueType fonts, since journals reject Type 3; a fixed salt, for reproducible SVG files."""
_WITHOUT_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
_HEIGHT, _DOTS_PER_INCH, _POINTS = 0.72, 300, 1000


@dataclass(frozen=True)
class Panel:
    """Axes of a figure: a function that draws on them, and their labels."""

    draw: Callable[[Any], None]
    x_label: str
    y_label: str


def write_figure(folder: Path, name: str, panels: Sequence[Panel], width: float) -> list[Path]:
    """Draw panels side by side, and write `name`.pdf, .svg and .png to a folder.

    Args:
        width: width of the whole figure in inches.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    # Keep matplotlib's font cache in ezpz_llm's cache directory.
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
    """Return matplotlib's color and marker options for a series."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def write_report_figures(runs: Sequence[Run], folder: Path, width: float = PAGE) -> list[Path]:
    """Write loss and throughput of runs over tokens to curves.pdf, .svg and .png.

    Raises:
        UserError: see write_figure.
    """
    def loss(axes: Any) -> None:
        """Draw training loss over tokens, and validation loss as points."""
        for i, run in enumerate(runs):
            _curve(axes, run.tokens, run.column("loss"), run.name, i)
            if run.validation:
                axes.plot([tokens / 1e6 for tokens in run.tokens], run.column("val_loss"), linestyle="",
                          label="validation", **mark(i))
        axes.legend()

    def throughput(axes: Any) -> None:
        """Draw tokens/s of the steady steps."""
        for i, run in enumerate(runs):
            _curve(axes, steady_steps(run.tokens), steady_steps(run.column("tokens_per_second")), run.name, i)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: format_number(value))

    return write_figure(folder, "curves", (Panel(loss, "million tokens", "loss (nats/token)"),
                                           Panel(throughput, "million tokens", "tokens/s")), width)


def _curve(axes: Any, x: Any, y: Any, name: str, number: int) -> None:
    dashes = ("-", "--", "-.", ":")[number % 4]
    x, y = downsample([tokens / 1e6 for tokens in x], y, _POINTS)
    axes.plot(x, y, label=name, color=COLORS[number % len(COLORS)], linestyle=dashes)
