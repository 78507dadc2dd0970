"""Figure for a paper: the step-time breakdown as stacked bars, one per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ezpz_llm.explain import tables
from ezpz_llm.explain.diagnosis import Diagnosis
from ezpz_llm.report.figures import COLORS, COLUMN, PAGE, Panel, write_figure

_HATCHES = ("", "////", "", "\\\\\\\\", "", "....", "xxxx")
"""Hatches, so that adjacent parts differ in grayscale too."""
_HEIGHT = 0.8
"""Height of a bar, relative to the distance between bars."""
_MAX_COLUMN_BARS = 8
"""Maximum number of bars in a one-column figure. With more bars, labels would overlap."""


def write_explain_figures(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write step.pdf, step.svg and step.png: parts of a traced step, as a mean over ranks and for some ranks.

    Without traces, the figure shows the phases of rank 0. It is one column wide, or two columns with many ranks.

    Raises:
        UserError: see write_figure.
    """
    rows = [("rank 0", diagnosis.phases)] if diagnosis.split is None else tables.step_bars(diagnosis.split)
    names = list(rows[0][1])

    def draw(axes: Any) -> None:
        """Draw the stacked bars."""
        ends = [0.0] * len(rows)
        for i, name in enumerate(names):
            parts = [1e3 * bar[name] for _, bar in rows]
            axes.barh([row for row, _ in rows], parts, _HEIGHT, ends, label=name, color=COLORS[i % len(COLORS)],
                      hatch=_HATCHES[i % len(_HATCHES)], edgecolor="white", linewidth=0.3)
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside upper center", ncols=3)

    return write_figure(folder, "step", (Panel(draw, "ms per step", ""),),
                        COLUMN if len(rows) <= _MAX_COLUMN_BARS else PAGE)
