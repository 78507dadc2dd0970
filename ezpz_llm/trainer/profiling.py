"""Profiles, traces and counterfactual timing of chosen steps."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from ezpz_llm.dist import Dist
from ezpz_llm.dist.stubbed import stubbed_collectives
from ezpz_llm.engine.base import Engine
from ezpz_llm.model.parameters import product_flops_per_token
from ezpz_llm.observe import HostProfile, StepWatch, TraceProfile, Window, profile_window
from ezpz_llm.observe.profile import PROFILE_STEPS, SKIP_STEPS
from ezpz_llm.trainer.collective_trace import StepTrace
from ezpz_llm.trainer.plan import RunPlan


def profiles(plan: RunPlan, dist: Dist, engine: Engine, first_step: int) -> list[StepWatch]:
    """The profiles that the configuration asks for: Python on rank 0, traces on every rank."""
    config = plan.config
    wanted: list[StepWatch] = []
    if config.profile and dist.is_main and (window := profile_window(first_step, config.steps)):
        wanted.append(HostProfile(dist.run_dir, window, dist.side))
    # After the host profile's steps: each would find the other's cost in its own. One step is for StepTrace, and
    # the run's last is followed by all that ends a run.
    skip = SKIP_STEPS + (PROFILE_STEPS if config.profile else 0)
    window = profile_window(first_step + 1, config.steps - 1, config.trace_steps, skip)
    if not config.trace_steps or window is None:
        return wanted
    step_trace = StepTrace(window.first - 1, dist, engine, counts=not config.compile, products=_products(plan))
    wanted += [step_trace, TraceProfile(dist.run_dir, dist.rank, window, lambda: _notes(plan, dist, step_trace),
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
    if layout.engine != "deepspeed" or layout.zero.stage == 3 or layout.tp * layout.pp * layout.sp > 1:
        return None
    return product_flops_per_token(plan.model) / 3 * batch.micro_batch * batch.accumulation * plan.model.block_size


def _notes(plan: RunPlan, dist: Dist, step_trace: StepTrace) -> dict[str, Any]:
    """What a reader of the trace cannot find in it."""
    return {"rank": dist.rank, "device": dist.device.type, "layout": plan.resolved.layout.name,
            **step_trace.found}


# The same steps with and without collectives, in turns: the direct measure of what communication costs.
_TURN = 4
"""Steps between changes; the first of each pays for the change, and is not counted."""


class Counterfactual:
    """Times the window's steps on this rank: `profile/counterfactual-rankNNNN.json`.

    Every rank leaves a barrier for each of them, so that none pays for what another did before.
    """

    def __init__(self, dist: Dist, window: Window) -> None:
        self._dist = dist
        self._window = window
        self._inside: ExitStack | None = None
        self._began = 0.0
        self._seconds: dict[str, list[float]] = {"real": [], "stubbed": []}

    def before_step(self, step: int) -> None:
        """Meet the other ranks; leave them again where it is the turn of steps without collectives."""
        if not self._window.first <= step <= self._window.last:
            return
        self._inside = ExitStack()
        self._dist.barrier()
        if self._is_stubbed(step):
            self._inside.enter_context(stubbed_collectives())
        self._began = time.perf_counter()

    def after_step(self, step: int) -> None:
        """Note the step's time; collectives are real again."""
        if self._inside is None:
            return
        seconds = time.perf_counter() - self._began
        if (step - self._window.first) % _TURN:
            self._seconds["stubbed" if self._is_stubbed(step) else "real"].append(seconds)
        self.close()
        if step == self._window.last:
            self._dist.side.write_json(self._dist.run_dir.counterfactual(self._dist.rank),
                                       {"rank": self._dist.rank, **self._seconds})

    def close(self) -> None:
        """Collectives are real again, whatever ended the step."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _is_stubbed(self, step: int) -> bool:
        return (step - self._window.first) // _TURN % 2 == 1
