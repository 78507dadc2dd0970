"""HTML page and figures of a study: tables, throughput, efficiency, step-time breakdown, and provenance."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ezpz_llm.core.rundir import redact_words
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.training.report.document import Part, page
from ezpz_llm.training.report.figures import COLORS, MARKERS, Figure, Panel, bars_figure, name_text
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, Curve, Measured, Unit, shared_unit
from ezpz_llm.verify.scaling.findings import Findings
from ezpz_llm.verify.scaling.study import Provenance
from ezpz_llm.verify.scaling.tables import Section, sections, study_notes

_IDEAL: dict[str, Any] = {"linestyle": "--", "color": "0.5", "linewidth": 0.8, "zorder": 0, "label": "ideal"}


def findings_page(findings: Findings, now: float | None = None) -> str:
    """Return the report as one self-contained HTML page; `now` is in epoch seconds.

    Raises:
        UserError: matplotlib cannot be imported.
    """
    typed = [shlex.join(redact_words(findings.typed))] if findings.typed else []
    bodies: list[tuple[str, Sequence[Part]]] = [("Study", [*typed, *study_notes(findings)])]
    bodies += [(section.heading, [*section.tables, *_section_figures(section)]) for section in sections(findings)]
    bodies.append(("Provenance of each point", _provenance_tables(findings)))
    return page(f"Scaling study {findings.name}", "ezpz-llm scale report", bodies, now)


def _section_figures(section: Section) -> list[Figure]:
    traced = [(point.name, split) for point in section.points if (split := point.split)]
    return [*([bars_figure("breakdown", "Traced step, mean over ranks", traced, "ms", 1e3)] if traced else []),
            *([scaling_figure(section.curves)] if section.curves else [])]


def scaling_figure(curves: Sequence[Curve]) -> Figure:
    """Return the figure of throughput and efficiency of the curves of one mode."""
    mode, unit = curves[0].mode, shared_unit(curves)

    def draw_throughput(axes: Any) -> None:
        """Draw tokens/s, and ideal scaling from the smallest point."""
        for i, curve in enumerate(curves):
            _draw_points(axes, curve, i, unit, [_throughput(point) for point in curve.points])
            axes.plot([point.size(unit) for point in curve.points],
                      [curve.base.tokens_per_second_per_device * point.ranks for point in curve.points], **_IDEAL)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
        _set_size_axis(axes, curves, unit)

    def draw_efficiency(axes: Any) -> None:
        """Draw efficiencies relative to the smallest point."""
        for i, curve in enumerate(curves):
            _draw_points(axes, curve, i, unit, [_efficiency(curve, point) for point in curve.points])
        axes.axhline(100, **_IDEAL)
        axes.set_ylim(bottom=0)
        _set_size_axis(axes, curves, unit)

    return Figure(f"scaling-{mode}", f"{mode.capitalize()} scaling: throughput, and efficiency relative to the "
                  f"smallest size, with {CONFIDENCE:.0%} intervals",
                  (Panel(draw_throughput, unit, "tokens/s"), Panel(draw_efficiency, unit, "efficiency (%)")))


def _throughput(point: Measured) -> tuple[float, float, float]:
    tokens, time = point.first.step_tokens, point.step_time
    fast, slow = time.interval or (time.value, time.value)
    return tokens / time.value, tokens / slow, tokens / fast


def _efficiency(curve: Curve, point: Measured) -> tuple[float, float, float]:
    estimate = curve.efficiency(point)
    low, high = estimate.interval or (estimate.value, estimate.value)
    return 100 * estimate.value, 100 * low, 100 * high


def _draw_points(axes: Any, curve: Curve, number: int, unit: Unit,
                 values: Sequence[tuple[float, float, float]]) -> None:
    """Draw a (value, low, high) for each point of a curve. Points without an interval have no error bar."""
    errors = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
    axes.errorbar([point.size(unit) for point in curve.points], [value for value, _, _ in values], errors,
                  label=name_text(curve.ds_config), color=COLORS[number % len(COLORS)],
                  marker=MARKERS[number % len(MARKERS)], capsize=2)


def _set_size_axis(axes: Any, curves: Sequence[Curve], unit: Unit) -> None:
    """Make the x axis logarithmic (base 2), with a tick at each measured size."""
    sizes = sorted({point.size(unit) for curve in curves for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()


def _provenance_tables(findings: Findings) -> list[Part]:
    origins = findings.provenance
    if not origins:
        return ["No record of the runs was found."]
    common = _common_environment(list(origins.values()))
    tables: list[Part] = [Table("Environment of all points", ("", "value"), tuple(common.items()))]
    for name, origin in origins.items():
        specific = tuple(item for item in origin.environment.items() if item[0] not in common)
        tables.append(Table(f"Point {name}", ("", "value") if specific else (), specific, origin.commands))
    return tables


def _common_environment(provenance: Sequence[Provenance]) -> dict[str, str]:
    return {key: value for key, value in provenance[0].environment.items()
            if all(origin.environment.get(key) == value for origin in provenance)}
