"""A diagnosis as one HTML page that needs nothing besides itself: what cost most, then what it was found from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ezpz_llm.base import counted
from ezpz_llm.base.shell_commands import typable_text
from ezpz_llm.explain import tables
from ezpz_llm.explain.causes import Cause
from ezpz_llm.explain.diagnosis import Diagnosis, check_sentences
from ezpz_llm.explain.split import Split
from ezpz_llm.report.chart import Form, bars
from ezpz_llm.report.document import items, page, table_of, written_by


def explain_page(diagnosis: Diagnosis, now: float | None = None) -> str:
    """The page; `now` in epoch seconds."""
    intro = written_by("ezpz-llm explain", now) + items(
        [f"layout {diagnosis.layout}, {counted(diagnosis.ranks, 'rank')}", str(diagnosis.run_dir)])
    sections = [("What cost most", _causes(diagnosis))]
    if diagnosis.split is not None:
        sections += _traced(diagnosis.split)
    else:
        sections.append(("A step", _bars("A steady step on rank 0", [("rank 0", diagnosis.phases)], "ms")
                         + table_of(tables.phases_table(diagnosis.phases))))
    if diagnosis.counterfactual:
        sections.append(("Without collectives", table_of(tables.counterfactual_table(diagnosis.counterfactual))))
    if diagnosis.memory:
        sections.append(("Memory", _bars("Memory, each kind on the rank that uses most of it",
                                         tables.memory_bars(diagnosis.memory), "MB")
                         + table_of(tables.memory_table(diagnosis.memory))))
    if sentences := check_sentences(diagnosis.checks):
        sections.append(("Checks by other tools", items(sentences)))
    if diagnosis.wall:
        sections.append(("The whole run", _bars("Wall time of rank 0", [("rank 0", diagnosis.wall)], "s")
                         + table_of(tables.run_table(diagnosis.wall))))
    return page(f"Where the time of run {diagnosis.run_dir.name} went", intro, sections)


def _causes(diagnosis: Diagnosis) -> str:
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in diagnosis.opening)
    shown = diagnosis.shown_causes
    text += f"<p>{escape(tables.CAUSES)}:{'' if shown else f' {tables.NO_CAUSE}.'}</p>"
    if shown:
        rows = "".join(_cause(cause, cause.seconds / shown[0].seconds) for cause in shown)
        text += f'<ol class="ranking">{rows}</ol>'
    if diagnosis.unseen:
        text += f'<p class="warning">{escape(diagnosis.unseen)}</p>'
    return text


def _cause(cause: Cause, length: float) -> str:
    return (f"<li><strong>{cause.share:.1%}, {cause.seconds:.2f} s</strong> {escape(cause.what)}"
            f'<div class="bar" aria-hidden="true"><i style="width:{length:.2%}"></i></div>'
            f"{items(f'Try: {typable_text(line)}' for line in cause.advice)}</li>")


def _traced(split: Split) -> list[tuple[str, str]]:
    """Sections that traces alone can fill."""
    found = [("A traced step", _bars("Parts of a traced step", tables.step_bars(split), "ms")
              + table_of(tables.window_table(split)))]
    if split.by_label:
        found.append(("Collectives", _bars("Time in flight in a step of the mean rank",
                                           tables.collective_bars(split), "ms")
                      + table_of(tables.collectives_table(split))))
    if len(split.ranks) > 1:
        found.append(("Ranks", table_of(tables.ranks_table(split))))
    return found


_UNITS: dict[str, tuple[float, Form]] = {
    "ms": (1e3, lambda value: f"{value:.2f}"), "s": (1.0, lambda value: f"{value:.1f}"),
    "MB": (1e-6, lambda value: f"{value:,.1f}")}
"""What base units are multiplied by, and how the result is written."""


def _bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Stacked bars of values in base units. What has no length, less than nothing or no number, is left out."""
    scale, form = _UNITS[unit]
    drawn = [(name, {part: scale * value for part, value in parts.items() if math.isfinite(value) and value >= 0})
             for name, parts in rows]
    return bars(f"{title}, {unit}", drawn, unit, form, folded=True) if any(parts for _, parts in drawn) else ""
