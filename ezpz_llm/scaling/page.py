"""A study as one HTML page that needs nothing besides itself (no torch)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from html import escape

from ezpz_llm.observe.throughput import short_number
from ezpz_llm.report.document import Axis, Series, bars, chart, items, page, table, views, written_by
from ezpz_llm.rundir.secrets import redact_words
from ezpz_llm.scaling.efficiency import Curve, Measured
from ezpz_llm.scaling.findings import Extrapolation, Findings
from ezpz_llm.scaling.fit import Fit, line
from ezpz_llm.scaling.study import Provenance
from ezpz_llm.scaling.tables import Section, Table, sections, study_notes

_PERCENT = Axis("%", lambda value: f"{value:.4g}")


def findings_page(findings: Findings, now: float | None = None) -> str:
    """The page."""
    intro = written_by("ezpz-llm scale report", now)
    if findings.typed:
        intro += f"<p><code>{escape(shlex.join(redact_words(findings.typed)))}</code></p>"
    bodies = [(one.heading, "".join(map(_table, one.tables)) + _drawing(one, findings.extrapolations))
              for one in sections(findings)]
    bodies.append(("Provenance of each point", _provenance(findings)))
    return page(f"Scaling study {findings.name}", intro + items(study_notes(findings)), bodies)


def _drawing(section: Section, extrapolations: Sequence[Extrapolation]) -> str:
    traced = [(point.name, split) for point in section.points if (split := point.split)]
    if traced:
        return bars("A traced step of the mean rank", traced, "ms", lambda value: f"{value * 1e3:.1f}")
    if not (curves := section.curves):
        return ""
    mode, unit = curves[0].mode, Axis(curves[0].unit, lambda value: f"{value:.4g}")
    fits = {one.ds_config: one.fit for one in extrapolations if one.fit is not None}
    return views(f"{mode}-scaling", "Show", [
        ("efficiency", chart(f"Efficiency, {mode} scaling: measured as dots, by the fit as lines with their bands",
                             unit, _PERCENT, _efficiency_series(curves, fits))),
        ("tokens/s", chart("Tokens a second, and what the smallest point would give without any loss", unit,
                           Axis("tokens/s", short_number), _speed_series(curves))),
        ("step time", chart("Step time", unit, Axis("ms", lambda value: f"{value:.4g}"), _measured(
            curves, lambda curve, point: point.step_time.value * 1e3))),
    ])


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
    return (table(one.title, one.columns, one.rows) if one.columns else "") + items(one.notes)
