"""What --check says of a run: what was decided, which rank stands where, what it warns of (imports no torch)."""

from __future__ import annotations

from dataclasses import replace

from ezpz_llm.engine.rank_map import Places, crossing, rank_map
from ezpz_llm.errors import UserError
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.plan import RunPlan, plan_run


def account(plan: RunPlan, places: Places) -> str:
    """What was decided and by whom; with hosts, also each rank's place in the layout."""
    layout = plan.resolved.layout
    parts = [plan.resolved.explain()]
    if places and layout.tp * layout.pp * layout.sp > 1:
        parts.append(rank_map(layout, places))
    return "\n\n".join(parts)


def warning(plan: RunPlan, options: Options, places: Places) -> str | None:
    """What would be slow on these hosts, with what to type instead."""
    def can_run(world_size: int, tp: int) -> bool:
        try:
            plan_run(replace(options, config=replace(options.config, tp=tp)), world_size)
        except UserError:
            return False
        return True

    return crossing(plan.resolved.layout, places, can_run) if places else None
