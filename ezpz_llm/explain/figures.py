"""A diagnosis as figures fit for a paper: the parts of a step as stacked bars, a bar a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ezpz_llm.explain import tables
from ezpz_llm.explain.diagnosis import Diagnosis
from ezpz_llm.report.figures import COLOURS, COLUMN, PAGE, Panel, write_figure

_HATCHES = ("", "////", "", "\\\\\\\\", "", "....", "xxxx")
"""For print in grey: neighbouring parts differ in more than their colour."""
_HEIGHT = 0.8
"""Of a bar; the rest of its place is a gap."""
_IN_A_COLUMN = 8
"""Bars whose names do not touch in a figure of one column."""


def write_explain_figures(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """The parts of a traced step, of the mean rank and of each; without traces the phases of rank 0. Written as
    step.pdf, .svg and .png, one column wide, or two for many ranks.

    Raises:
        UserError: see write_figure.
    """
    rows = [("rank 0", diagnosis.phases)] if diagnosis.split is None else tables.step_bars(diagnosis.split)
    names = list(rows[0][1])

    def draw(axes: Any) -> None:
        """Draw the rows from the top, each part at the end of the one before."""
        ends = [0.0] * len(rows)
        for i, name in enumerate(names):
            parts = [1e3 * bar[name] for _, bar in rows]
            axes.barh([row for row, _ in rows], parts, _HEIGHT, ends, label=name, color=COLOURS[i % len(COLOURS)],
                      hatch=_HATCHES[i % len(_HATCHES)], edgecolor="white", linewidth=0.3)
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside upper center", ncols=3)

    return write_figure(folder, "step", (Panel(draw, "ms a step", ""),),
                        COLUMN if len(rows) <= _IN_A_COLUMN else PAGE)
