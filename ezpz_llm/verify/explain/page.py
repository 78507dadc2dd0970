"""HTML page and figures of a diagnosis: the causes of lost time, then the data behind them."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.shell_commands import to_typable_text
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.report.document import Part, page
from ezpz_llm.training.report.figures import Figure, bars_figure
from ezpz_llm.verify.explain import tables
from ezpz_llm.verify.explain.causes import Cause
from ezpz_llm.verify.explain.diagnosis import Diagnosis, check_sentences
from ezpz_llm.verify.explain.split import Split


def explain_page(diagnosis: Diagnosis, now: float | None = None) -> str:
    """Return the page as HTML; `now` is in epoch seconds.

    Raises:
        UserError: matplotlib cannot be imported.
    """
    title = f"Step-time breakdown of run {diagnosis.run_dir.name}"
    return page(title, "ezpz-llm explain", _sections(diagnosis), now)


def explain_figures(diagnosis: Diagnosis) -> list[Figure]:
    """Return the figures of the page."""
    return [part for _, parts in _sections(diagnosis) for part in parts if isinstance(part, Figure)]


def _sections(diagnosis: Diagnosis) -> list[tuple[str, Sequence[Part]]]:
    run = f"{diagnosis.run_dir}: layout {diagnosis.layout}, {count_noun(diagnosis.ranks, 'rank')}"
    shown = diagnosis.shown_causes
    sections: list[tuple[str, Sequence[Part]]] = [("Causes of lost time", [
        run, *diagnosis.opening, f"{tables.CAUSES}:{'' if shown else f' {tables.NO_CAUSE}.'}", *map(_cause, shown),
        *([diagnosis.missing_traces_note] if diagnosis.missing_traces_note else [])])]
    if diagnosis.split is not None:
        sections += _trace_sections(diagnosis.split)
    else:
        sections.append(("Step time", [
            bars_figure("step", "Steady step on rank 0", [("rank 0", diagnosis.phases)], "ms", 1e3),
            tables.phases_table(diagnosis.phases)]))
    if diagnosis.memory:
        sections.append(("Memory", [
            bars_figure("memory", "Memory, each kind on the rank that uses most of it",
                        tables.memory_bars(diagnosis.memory), "MB", 1e-6),
            tables.memory_table(diagnosis.memory)]))
    if sentences := check_sentences(diagnosis.checks):
        sections.append(("Cross-checks with other tools", sentences))
    if diagnosis.wall:
        sections.append(("Wall time of the run", [
            bars_figure("wall", "Wall time of rank 0", [("rank 0", diagnosis.wall)], "s"),
            tables.run_table(diagnosis.wall)]))
    return sections


def _cause(cause: Cause) -> Table:
    return Table(f"{cause.share:.1%}, {cause.seconds:.2f} s {cause.what}", (), (),
                 tuple(f"Try: {to_typable_text(line)}" for line in cause.advice))


def _trace_sections(split: Split) -> list[tuple[str, Sequence[Part]]]:
    """Return the sections that require traces."""
    sections: list[tuple[str, Sequence[Part]]] = [("Traced steps", [
        bars_figure("step", "Parts of a traced step", tables.step_bars(split), "ms per step", 1e3),
        tables.traced_steps_table(split)])]
    if split.by_label:
        sections.append(("Collectives", [
            bars_figure("collectives", "Time in flight per step, mean over ranks", tables.collective_bars(split),
                        "ms per step", 1e3),
            tables.collectives_table(split)]))
    if len(split.ranks) > 1:
        sections.append(("Ranks", [tables.ranks_table(split)]))
    return sections
