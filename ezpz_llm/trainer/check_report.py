"""Report of --check and before step 1: settings with their sources, ranks, warnings (imports no torch)."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, replace
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.layout.layout import Places, crossing, rank_map
from ezpz_llm.layout.value_source import Origin, ValueSource
from ezpz_llm.trainer.config import FIELDS, MODEL_OVERRIDES
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.plan import RunPlan, plan_run
from ezpz_llm.trainer.schedule import ENDLESS, learning_rate

_WIDTH = 110


def settings(plan: RunPlan) -> str:
    """All values that the run uses, grouped by their sources; "-" where there is none."""
    groups: dict[ValueSource, list[str]] = {}
    for name, (value, source) in effective(plan).items():
        groups.setdefault(source, []).append(f"{name} {_show(value)}")
    lines = ["settings, by where they come from"]
    for source in sorted(groups, key=lambda source: (source.origin.rank, source.detail)):
        lines += textwrap.wrap(", ".join(groups[source]), _WIDTH, initial_indent=f"  {source}: ",
                               subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def effective(plan: RunPlan) -> dict[str, tuple[Any, ValueSource]]:
    """Each setting as the run uses it, with its source: what nobody gave is the model's or the layout's."""
    config, resolved = plan.config, plan.resolved
    layout, batch = resolved.layout, resolved.batch
    found = {name: (getattr(config, name), plan.sources[name]) for name in FIELDS}
    for name, value in asdict(plan.model).items():
        given = name in MODEL_OVERRIDES and getattr(config, name) is not None
        found[name] = (value, plan.sources[name] if given else ValueSource(Origin.MODEL, config.model))
    for name in ("tp", "pp", "sp"):
        given = getattr(config, name) is not None
        found[name] = (getattr(layout, name),
                       plan.sources[name] if given else ValueSource(Origin.FILE, f"ds_config {config.ds_config}"))
    for name, value in (*asdict(batch).items(), ("precision", resolved.precision), ("clip", resolved.clip)):
        if name in FIELDS:
            found[name] = (value, resolved.sources.get(name, plan.sources[name]))
    return found


def remarks(plan: RunPlan) -> list[str]:
    """Return warnings about settings that look like mistakes."""
    config, found = plan.config, list(plan.resolved.warnings)
    if config.warmup_steps > config.steps:
        found.append(f"the learning rate never reaches its peak: the warm-up takes {config.warmup_steps} steps, "
                     f"the run {config.steps}")
    elif config.decay_steps > config.steps and config.schedule not in ENDLESS:
        last = learning_rate(config.steps - 1, config)
        found.append(f"the learning rate ends at {last:.3g} and not at {config.min_lr:.3g}: its {config.schedule} "
                     f"is over only after step {config.decay_steps}, the run after step {config.steps}")
    return found


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and (" " in value or not value) else str(value)


# What --check says of a run: what was decided, which rank stands where, what it warns of.
def explain_plan(plan: RunPlan, places: Places) -> str:
    """Return each setting with its source; with nodes, also each rank's place in the layout."""
    layout = plan.resolved.layout
    parts = [plan.resolved.explain()]
    if places and layout.tp * layout.pp * layout.sp > 1:
        parts.append(rank_map(layout, places))
    return "\n\n".join(parts)


def warning(plan: RunPlan, options: Options, places: Places) -> str | None:
    """Return a warning about a layout that is slow on these nodes, with what to type instead."""
    def can_run(world_size: int, tp: int) -> bool:
        """True if the same run can be planned at this tensor-parallel degree."""
        try:
            plan_run(replace(options, config=replace(options.config, tp=tp)), world_size)
        except UserError:
            return False
        return True

    return crossing(plan.resolved.layout, places, can_run) if places else None
