"""Which steps of a run are looked at more closely, and how."""

from __future__ import annotations

from typing import Any

from ezpz_llm.dist import Dist
from ezpz_llm.engine.base import Engine
from ezpz_llm.model.flops import product_flops_per_token
from ezpz_llm.observe import HostProfile, StepWatch, TraceProfile, Window, profile_window
from ezpz_llm.observe.profile import PROFILE_STEPS, SKIP_STEPS
from ezpz_llm.trainer.census import Census
from ezpz_llm.trainer.counterfactual import Counterfactual
from ezpz_llm.trainer.plan import RunPlan


def profiles(plan: RunPlan, dist: Dist, engine: Engine, first_step: int) -> list[StepWatch]:
    """The profiles that the configuration asks for: the host's on rank 0, traces on every rank."""
    config = plan.config
    wanted: list[StepWatch] = []
    if config.profile and dist.is_main and (window := profile_window(first_step, config.steps)):
        wanted.append(HostProfile(dist.run_dir, window, dist.side))
    # After the host profile's steps: each would find the other's cost in its own. One step is for the census, and
    # the run's last is followed by all that ends a run.
    skip = SKIP_STEPS + (PROFILE_STEPS if config.profile else 0)
    window = profile_window(first_step + 1, config.steps - 1, config.trace_steps, skip)
    if not config.trace_steps or window is None:
        return wanted
    census = Census(window.first - 1, dist, engine, counts=not config.compile, products=_products(plan))
    wanted += [census, TraceProfile(dist.run_dir, dist.rank, window, lambda: _notes(plan, dist, census),
                                    dist.side)]
    if config.counterfactual_steps and dist.world_size > 1:
        # Not right after the trace, which is written before the next step.
        wanted.append(Counterfactual(dist, Window(window.last + 2, config.counterfactual_steps)))
    return wanted


def _products(plan: RunPlan) -> float | None:
    """FLOPs of a rank's matrix products in the forward passes of a step, where DeepSpeed can count the same.

    Under stage 3 it counts linear layers twice: its own stand-in for them, and the product inside.
    """
    layout, batch = plan.resolved.layout, plan.resolved.batch
    if layout.engine != "deepspeed" or layout.zero_stage == 3 or layout.tp * layout.pp * layout.sp > 1:
        return None
    return product_flops_per_token(plan.model) / 3 * batch.micro_batch * batch.accumulation * plan.model.block_size


def _notes(plan: RunPlan, dist: Dist, census: Census) -> dict[str, Any]:
    """What a reader of the trace cannot find in it."""
    return {"rank": dist.rank, "device": dist.device.type, "layout": plan.resolved.layout.name,
            **census.found}
