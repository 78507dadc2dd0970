"""Figures with matplotlib (the extra `figures`): panels, stacked bars, and files as PDF, SVG and PNG.

matplotlib and numpy are imported only when a figure is drawn.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import cache_dir, escape_control_characters, import_package
from ezpz_llm.core.rundir import write_file

COLUMN, PAGE = 3.35, 6.9
"""Width in inches of a column, and of the full page, in a two-column layout."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can distinguish (Okabe and Ito 2008). Markers, dashes and hatches also differ."""
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"
_HATCHES = ("", "////", "", "\\\\\\\\", "", "||||", "xxxx")
"""Lines only: a hatch of dots takes 260 kB in an SVG file."""
_STYLE = {"font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
          "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
          "grid.alpha": 0.3, "grid.linewidth": 0.5, "lines.linewidth": 1.2, "lines.markersize": 4,
          "axes.formatter.useoffset": False, "legend.frameon": False, "pdf.fonttype": 42, "svg.fonttype": "none",
          "svg.hashsalt": "ezpz_llm", "text.parse_math": False, "text.usetex": False}
"""Caption-size text; TrueType fonts, since journals reject Type 3; text in SVG files as text, since browsers have
fonts for more characters; a fixed salt, for reproducible files; no math, since names can contain dollar signs."""
MAX_VALUE = 1e100
"""Figures omit larger values, which only damaged files contain: matplotlib cannot scale an axis to the largest."""
_WITHOUT_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
_FORMS = tuple(_WITHOUT_DATE)
_COLUMNS = 2
"""Maximum number of panels in a row."""
_ASPECT, _DOTS_PER_INCH = 0.72, 300
_BAR_HEIGHT = 0.22
"""Height in inches of a bar and the space around it."""
_MAX_COLUMN_BARS = 8
_MAX_NAME_LENGTH = 40
_NOT_IN_XML = {0xFFFE: "?", 0xFFFF: "?"}


@dataclass(frozen=True)
class Panel:
    """Axes of a figure: a function that draws on them, and their labels."""

    draw: Callable[[Any], None]
    x_label: str
    y_label: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with one legend.

    Attributes:
        name: file name without its suffix.
        title: caption on a page; not part of the drawing.
        width: width in inches of files; figures on a page are PAGE wide, and COLUMN on narrow screens.
            Panels are below each other in a figure that is at most COLUMN wide.
        height: height of a panel in inches; 0 for 0.72 times its width.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    width: float = PAGE
    height: float = 0


def render(figure: Figure, width: float, forms: Sequence[str]) -> list[bytes]:
    """Draw a figure, and return it in each of the forms "pdf", "svg" and "png".

    Raises:
        UserError: matplotlib cannot be imported.
    """
    # Keep matplotlib's font cache in ezpz_llm's cache directory.
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))
    matplotlib = import_package("matplotlib", "a figure", "figures")
    figures = import_package("matplotlib.figure", "a figure", "figures")
    columns = min(len(figure.panels), _COLUMNS) if width > COLUMN else 1
    rows = math.ceil(len(figure.panels) / columns)
    contents = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The font has no glyph for some characters of names, and draws a box.
        warnings.filterwarnings("ignore", "Glyph ")
        drawing = figures.Figure(layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False).ravel()
        for panel, panel_axes in zip(figure.panels, axes, strict=False):
            panel.draw(panel_axes)
            panel_axes.set_xlabel(panel.x_label)
            panel_axes.set_ylabel(panel.y_label)
        for unused_axes in axes[len(figure.panels):]:
            unused_axes.set_axis_off()
        height = _add_legend(drawing, width) + rows * (figure.height or _ASPECT * width / columns)
        drawing.set_size_inches(width, height)
        for form in forms:
            content = io.BytesIO()
            drawing.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=_WITHOUT_DATE[form])
            contents.append(content.getvalue())
    return contents


def write_figures(folder: Path, figures: Sequence[Figure]) -> list[Path]:
    """Write figures to a folder as .pdf, .svg and .png, and return the paths.

    Raises:
        UserError: matplotlib cannot be imported, or a file cannot be written.
    """
    written = []
    for figure in figures:
        for form, content in zip(_FORMS, render(figure, figure.width, _FORMS), strict=True):
            written.append(folder / f"{figure.name}.{form}")
            write_file(written[-1], content)
    return written


def _add_legend(drawing: Any, width: float) -> float:
    """Add a legend above the panels, which share its entries, and return its height in inches."""
    handles = {label: handle for axes in drawing.axes
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(handles) < 2:
        return 0.0
    columns = min(4, max(1, int(width / (0.5 + 0.06 * max(map(len, handles))))))
    drawing.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
    return 0.15 * math.ceil(len(handles) / columns)


def name_text(name: str) -> str:
    """Return a name as text for a figure: abbreviated, without control characters.

    matplotlib omits names that begin with an underscore from the legend, so a space is put before it.
    """
    name = escape_control_characters(name).translate(_NOT_IN_XML)
    if len(name) > _MAX_NAME_LENGTH:
        half = _MAX_NAME_LENGTH // 2
        name = f"{name[:half - 1]}…{name[-half:]}"
    return f" {name}" if name.startswith("_") else name


def bars_figure(name: str, title: str, bars: Sequence[tuple[str, Mapping[str, float]]], unit: str,
                scale: float = 1.0) -> Figure:
    """Return a figure of stacked bars, one column wide if there are few.

    Args:
        bars: for each bar its name, and its parts by name. Negative and non-finite parts are omitted.
        scale: factor from the values to the unit.
    """
    parts = list(dict.fromkeys(part for _, values in bars for part in values))
    rows = range(len(bars))

    def draw(axes: Any) -> None:
        """Draw the first bar on top."""
        ends = [0.0] * len(bars)
        for i, part in enumerate(parts):
            lengths = [scale * values.get(part, 0.0) for _, values in bars]
            lengths = [length if 0 < length < MAX_VALUE else 0.0 for length in lengths]
            # Hatches, so that adjacent parts differ in grayscale too.
            axes.barh(rows, lengths, 0.8, ends, label=name_text(part), color=COLORS[i % len(COLORS)],
                      hatch=_HATCHES[i % len(_HATCHES)], edgecolor="white", linewidth=0.3)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        axes.set_yticks(rows, [name_text(bar) for bar, _ in bars])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    width = COLUMN if len(bars) <= _MAX_COLUMN_BARS else PAGE
    return Figure(name, title, (Panel(draw, unit),), width, height=0.5 + _BAR_HEIGHT * len(bars))
