"""A study in the terminal: tables, remarks, and the efficiency over size (no torch)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from ezpz_llm.observe.plots import Curve as Drawn
from ezpz_llm.observe.plots import curves_plot
from ezpz_llm.observe.tables import table
from ezpz_llm.scaling.efficiency import Curve
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.predict import line
from ezpz_llm.scaling.remarks import curve_remarks, study_remarks
from ezpz_llm.scaling.tables import (
    STEPS_ONLY,
    Table,
    contest_table,
    curve_table,
    failed_table,
    fit_notes,
    fit_table,
    prediction_table,
    split_table,
)

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = (39, 208, 42, 170, 220, 205, 51, 250)
"""Of the terminal's 256: apart from each other on black and on white."""
_HEIGHT = 16


def findings_text(findings: Findings, width: int, *, colour: bool) -> str:
    """The findings as text, with escape codes only if `colour`."""
    def drawn(one: Table) -> str:
        return table(one.title, one.columns, one.rows, rich=colour)

    parts = [f"Study {findings.name}\n" + _said(study_remarks(findings), width)]
    for curve in findings.curves:
        parts.append(drawn(curve_table(curve)) + _said(curve_remarks(curve), width))
    for contest in findings.contests:
        alone = any(point.step_time.basis == "steps" for point in contest)
        parts.append(drawn(contest_table(contest)) + _said([STEPS_ONLY] * alone, width))
    measured = [point for point in findings.points if point.good]
    parts.append(drawn(split_table("Where a step goes (ms of the mean rank in the traced steps; times and rates "
                                   "above leave these out)", measured)))
    parts += [efficiency_plot(curves, findings.extrapolations, width, colour=colour)
              for mode in ("weak", "strong") if (curves := [one for one in findings.curves if one.mode == mode])]
    for one in findings.extrapolations:
        parts.append(_extrapolation(one, drawn, width))
    if failed := failed_table(findings):
        parts.append(drawn(failed))
    return "\n".join(parts)


def _extrapolation(one: Extrapolation, drawn: Callable[[Table], str], width: int) -> str:
    if one.fit is None:
        return _said(fit_notes(one), width)
    text = drawn(fit_table(one.ds_config, one.fit)) + _said(fit_notes(one), width)
    if predicted := prediction_table(one):
        text += drawn(predicted)
    return text + _said([f"{target.curve.name}: {target.describe()}" for target in one.targets], width)


def efficiency_plot(curves: Sequence[Curve], extrapolations: Sequence[Extrapolation], width: int, *,
                    colour: bool) -> str:
    """Efficiency of the curves of one mode: letters where it was measured, lines where the fits say so."""
    fits = {one.ds_config: one.fit for one in extrapolations}
    drawn, keys = [], []
    for i, curve in enumerate(curves):
        own = _COLOURS[i % len(_COLOURS)] if colour and len(curves) > 1 else -1
        letter = _LETTERS[i % len(_LETTERS)]
        if fit := fits.get(curve.ds_config):
            by_fit = line(fit, curve)
            drawn.append(Drawn(curve.name, [size for size, _, _ in by_fit], [100 * mean for _, mean, _ in by_fit],
                               colour=own))
        drawn.append(Drawn(curve.name, [curve.size(point) for point in curve.points],
                           [100 * curve.efficiency(point).value for point in curve.points], mark=letter,
                           colour=own))
        keys.append(f"  {letter} {curve.name}: measured" + ("; line: by its fit" if fit else ""))
    unit = curves[0].unit
    return curves_plot(drawn, f"{curves[0].mode} scaling: efficiency", unit, "%", width, _HEIGHT,
                       colour=colour) + "".join(f"{key}\n" for key in keys)


def _said(sentences: Iterable[str], width: int) -> str:
    return "".join(textwrap.fill(one, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False,
                                 break_on_hyphens=False) + "\n" for one in sentences)
