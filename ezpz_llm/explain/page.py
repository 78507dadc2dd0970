"""Diagnosis as a self-contained HTML page: the causes of lost time, then the data behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ezpz_llm.base import count_noun
from ezpz_llm.base.shell_commands import to_typable_text
from ezpz_llm.explain import tables
from ezpz_llm.explain.causes import Cause
from ezpz_llm.explain.diagnosis import Diagnosis, check_sentences
from ezpz_llm.explain.split import Split
from ezpz_llm.report.chart import Form, bars
from ezpz_llm.report.document import items, page, table_of, written_by


def explain_page(diagnosis: Diagnosis, now: float | None = None) -> str:
    """Return the page as HTML; `now` is in epoch seconds."""
    intro = written_by("ezpz-llm explain", now) + items(
        [f"layout {diagnosis.layout}, {count_noun(diagnosis.ranks, 'rank')}", str(diagnosis.run_dir)])
    sections = [("Causes of lost time", _causes(diagnosis))]
    if diagnosis.split is not None:
        sections += _trace_sections(diagnosis.split)
    else:
        sections.append(("Step time", _bars("Steady step on rank 0", [("rank 0", diagnosis.phases)], "ms")
                         + table_of(tables.phases_table(diagnosis.phases))))
    if diagnosis.counterfactual:
        sections.append(("Without collectives", table_of(tables.counterfactual_table(diagnosis.counterfactual))))
    if diagnosis.memory:
        sections.append(("Memory", _bars("Memory, each kind on the rank that uses most of it",
                                         tables.memory_bars(diagnosis.memory), "MB")
                         + table_of(tables.memory_table(diagnosis.memory))))
    if sentences := check_sentences(diagnosis.checks):
        sections.append(("Cross-checks with other tools", items(sentences)))
    if diagnosis.wall:
        sections.append(("Wall time of the run", _bars("Wall time of rank 0", [("rank 0", diagnosis.wall)], "s")
                         + table_of(tables.run_table(diagnosis.wall))))
    return page(f"Step-time breakdown of run {diagnosis.run_dir.name}", intro, sections)


def _causes(diagnosis: Diagnosis) -> str:
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in diagnosis.opening)
    shown = diagnosis.shown_causes
    text += f"<p>{escape(tables.CAUSES)}:{'' if shown else f' {tables.NO_CAUSE}.'}</p>"
    if shown:
        rows = "".join(_cause(cause, cause.seconds / shown[0].seconds) for cause in shown)
        text += f'<ol class="ranking">{rows}</ol>'
    if diagnosis.missing_traces_note:
        text += f'<p class="warning">{escape(diagnosis.missing_traces_note)}</p>'
    return text


def _cause(cause: Cause, length: float) -> str:
    return (f"<li><strong>{cause.share:.1%}, {cause.seconds:.2f} s</strong> {escape(cause.what)}"
            f'<div class="bar" aria-hidden="true"><i style="width:{length:.2%}"></i></div>'
            f"{items(f'Try: {to_typable_text(line)}' for line in cause.advice)}</li>")


def _trace_sections(split: Split) -> list[tuple[str, str]]:
    """Return the sections that require traces."""
    sections = [("Traced steps", _bars("Parts of a traced step", tables.step_bars(split), "ms")
                 + table_of(tables.traced_steps_table(split)))]
    if split.by_label:
        sections.append(("Collectives", _bars("Time in flight per step, mean over ranks",
                                              tables.collective_bars(split), "ms")
                         + table_of(tables.collectives_table(split))))
    if len(split.ranks) > 1:
        sections.append(("Ranks", table_of(tables.ranks_table(split))))
    return sections


_UNITS: dict[str, tuple[float, Form]] = {
    "ms": (1e3, lambda value: f"{value:.2f}"), "s": (1.0, lambda value: f"{value:.1f}"),
    "MB": (1e-6, lambda value: f"{value:,.1f}")}
"""Factor from the base unit (seconds, bytes), and format of the result, by unit."""


def _bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Return stacked bars of values in base units (seconds, bytes), without negative and non-finite values."""
    scale, form = _UNITS[unit]
    drawn = [(name, {part: scale * value for part, value in parts.items() if math.isfinite(value) and value >= 0})
             for name, parts in rows]
    return bars(f"{title}, {unit}", drawn, unit, form, folded=True) if any(parts for _, parts in drawn) else ""
