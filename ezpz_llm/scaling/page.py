"""A study as one HTML page that needs nothing besides itself (no torch)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape

from ezpz_llm.observe.throughput import short_number
from ezpz_llm.report.charts import Axis, Series, bars, chart, table
from ezpz_llm.report.document import page, views
from ezpz_llm.rundir.secrets import redact_words
from ezpz_llm.scaling.efficiency import Curve, Measured
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.fit import Fit, line
from ezpz_llm.scaling.sample import Provenance
from ezpz_llm.scaling.tables import (
    STEPS_ONLY,
    Table,
    contest_table,
    curve_remarks,
    curve_table,
    failed_table,
    fit_notes,
    fit_table,
    prediction_table,
    split_table,
    study_remarks,
)

_PERCENT = Axis("%", lambda value: f"{value:.4g}")


def findings_page(findings: Findings, now: float | None = None) -> str:
    """The page."""
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    intro = f'<p class="faint">Written {escape(written)} by <code>ezpz-llm scale report</code>.</p>'
    if findings.typed:
        intro += f"<p><code>{escape(shlex.join(redact_words(findings.typed)))}</code></p>"
    sections = []
    for mode in ("weak", "strong"):
        if curves := [curve for curve in findings.curves if curve.mode == mode]:
            sections.append((f"{mode.capitalize()} scaling", _scaling(curves, findings.extrapolations)))
    if findings.contests:
        sections.append(("Layouts compared", "".join(
            _table(contest_table(contest)) + _list([STEPS_ONLY] * any(
                point.step_time.basis == "steps" for point in contest)) for contest in findings.contests)))
    sections.append(("Step-time breakdown", _where([point for point in findings.points if point.good])))
    if findings.extrapolations:
        sections.append(("Beyond what was measured", "".join(map(_extrapolation, findings.extrapolations))))
    if failed := failed_table(findings):
        sections.append(("Failed runs", _table(failed)))
    sections.append(("Provenance of each point", _provenance(findings)))
    return page(f"Scaling study {findings.name}", intro + _list(study_remarks(findings)), sections)


def _scaling(curves: Sequence[Curve], extrapolations: Sequence[Extrapolation]) -> str:
    tables = "".join(_table(curve_table(curve)) + _list(curve_remarks(curve)) for curve in curves)
    mode, unit = curves[0].mode, Axis(curves[0].unit, lambda value: f"{value:.4g}")
    fits = {one.ds_config: one.fit for one in extrapolations if one.fit is not None}
    panels = [
        ("efficiency", chart(f"Efficiency, {mode} scaling: measured as dots, by the fit as lines with their bands",
                             unit, _PERCENT, _efficiency_series(curves, fits))),
        ("tokens/s", chart("Tokens a second, and what the smallest point would give without any loss", unit,
                           Axis("tokens/s", short_number), _speed_series(curves))),
        ("step time", chart("Step time", unit, Axis("ms", lambda value: f"{value:.4g}"), _measured(
            curves, lambda curve, point: point.step_time.value * 1e3))),
    ]
    return tables + views(f"{mode}-scaling", "Show", panels)


def _measured(curves: Sequence[Curve], value: Callable[[Curve, Measured], float], *, dots: bool = False,
              said: str = "") -> list[Series]:
    return [Series(f"{curve.ds_config}{said}", [curve.size(point) for point in curve.points],
                   [value(curve, point) for point in curve.points], i, dots) for i, curve in enumerate(curves)]


def _efficiency_series(curves: Sequence[Curve], fits: dict[str, Fit]) -> list[Series]:
    series = _measured(curves, lambda curve, point: 100 * curve.efficiency(point).value, dots=True,
                       said=", measured")
    for i, curve in enumerate(curves):
        if curve.ds_config not in fits:
            continue
        drawn = line(fits[curve.ds_config], curve)
        sizes = [size for size, _, _ in drawn]
        series.append(Series(f"{curve.ds_config}, fit", sizes, [100 * mean for _, mean, _ in drawn], i))
        # A number that is eight more has the same colour and other dashes.
        series += [Series(f"{curve.ds_config}, {edge} edge", sizes, [100 * band[side] for _, _, band in drawn],
                          i + 8) for side, edge in enumerate(("lower", "upper"))]
    return series


def _speed_series(curves: Sequence[Curve]) -> list[Series]:
    ideal = [Series(f"{curve.ds_config}, without loss", [curve.size(point) for point in curve.points],
                    [curve.base.tokens_per_second_per_device * point.ranks for point in curve.points], i + 8)
             for i, curve in enumerate(curves)]
    return _measured(curves, lambda curve, point: point.tokens_per_second) + ideal


def _where(points: Sequence[Measured]) -> str:
    drawn = ""
    for mode in ("weak", "strong"):
        traced = [(point.name, split) for point in points if point.mode == mode and (split := point.split)]
        if traced:
            drawn += bars(f"A traced step of the mean rank, {mode} scaling", traced, "ms",
                          lambda value: f"{value * 1e3:.1f}")
    return drawn + _table(split_table("Times in ms of the traced steps, which the other tables leave out", points))


def _extrapolation(one: Extrapolation) -> str:
    if one.fit is None:
        return _list(fit_notes(one))
    predicted = prediction_table(one)
    return (_table(fit_table(one.ds_config, one.fit)) + _list(fit_notes(one))
            + (_table(predicted) if predicted else "")
            + _list(f"{target.curve.name}: {target.describe()}" for target in one.targets))


def _provenance(findings: Findings) -> str:
    common = _common(list(findings.provenance.values()))
    text = _table(Table("The same for all points", ("", "value"), tuple(common.items()))) if common else ""
    for name, origin in findings.provenance.items():
        own = tuple((key, value) for key, value in origin.environment.items() if key not in common)
        words = "".join(f"<p><code>{escape(command)}</code></p>" for command in origin.commands)
        rows = _table(Table(f"Environment of {name} that others have not", ("", "value"), own)) if own else ""
        text += f"<details><summary>{escape(name)}</summary>{words}{rows}</details>"
    return text or '<p class="empty">No record of the runs was found.</p>'


def _common(provenance: Sequence[Provenance]) -> dict[str, str]:
    first = provenance[0].environment if provenance else {}
    return {key: value for key, value in first.items()
            if all(origin.environment.get(key) == value for origin in provenance)}


def _table(one: Table) -> str:
    return table(one.title, one.columns, one.rows)


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(one)}</li>" for one in sentences)
    return f"<ul>{items}</ul>" if items else ""
