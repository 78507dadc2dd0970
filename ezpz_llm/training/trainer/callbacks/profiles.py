"""Python profile and torch traces of a few steps of a training run, as configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.step_trace import StepTrace
from ezpz_llm.training.model.parameters import product_flops_per_token
from ezpz_llm.training.observe import (
    PythonProfile,
    StepWatch,
    TraceProfile,
    WallClock,
    profile_window,
    trace_window,
)
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.plan import RunPlan


class StepProfile(Callback):
    """Profile of some steps, which is disabled at its first failure, instead of ending the run.

    `after_step(collective_at)` of the watch makes collective calls; all other calls of the watch are local.
    """

    def __init__(self, watch: StepWatch, what: str, dist: Dist, clock: WallClock,
                 collective_at: int | None = None) -> None:
        self.watch = watch
        self._what, self._optional, self._clock = what, dist.optional, clock
        self._collective_at = collective_at
        self._last_step, self._failed = -1, False

    def on_step_begin(self, context: CallbackContext) -> None:
        """Call the watch before a step. After a rollback to an earlier step, close it first."""
        with self._clock.span("profiles"):
            if context.step <= self._last_step:
                self._attempt(self.watch.close)
            self._last_step = context.step
            self._attempt(lambda: self.watch.before_step(context.step))

    def on_step_end(self, context: CallbackContext) -> None:
        """Call the watch after a step."""
        step = context.step - 1
        with self._clock.span("profiles"):
            if step == self._collective_at:
                self._optional.attempt_together(self._what, lambda: self._after_collective_step(step))
            else:
                self._attempt(lambda: self.watch.after_step(step))

    def on_train_end(self, context: CallbackContext) -> None:
        """Close the watch."""
        self._attempt(self.watch.close)

    def _after_collective_step(self, step: int) -> None:
        if self._failed:
            raise RuntimeError("it did not start on this rank")
        self.watch.after_step(step)

    def _attempt(self, action: Callable[[], None]) -> None:
        def succeeded() -> bool:
            """Return True, since `attempt` returns None after a failure."""
            action()
            return True

        if not self._failed:
            self._failed = self._optional.attempt(self._what, succeeded) is None


def profiles(plan: RunPlan, dist: Dist, engine: Engine, clock: WallClock, first_step: int) -> list[StepProfile]:
    """Return the configured profiles: Python on rank 0, traces on every rank."""
    config = plan.config
    configured: list[StepProfile] = []
    if config.profile and dist.is_main and (window := profile_window(first_step, config.steps)):
        configured.append(StepProfile(PythonProfile(dist.run_dir, window, dist.side), "the Python profile", dist,
                                      clock))
    # After the Python profile, so that neither measures the other.
    window = trace_window(first_step, config.steps, config.trace_steps, has_profile=config.profile)
    if window is None:
        return configured
    step_trace = StepTrace(window.first - 1, dist, engine, counts=not config.compile,
                           products=_forward_matmul_flops(plan))
    trace = TraceProfile(dist.run_dir, dist.rank, window, lambda: _notes(plan, dist, step_trace), dist.side)
    return [*configured, StepProfile(step_trace, "the trace of one step", dist, clock, window.first - 1),
            StepProfile(trace, "the trace of steps", dist, clock)]


def _forward_matmul_flops(plan: RunPlan) -> float | None:
    """Return a rank's matmul FLOPs in the forward passes of a step; None if DeepSpeed would count something else.

    Under stage 3, DeepSpeed counts each linear layer twice: as its replacement for the layer, and as the matmul in
    it.
    """
    layout, batch = plan.resolved.layout, plan.resolved.batch
    if layout.engine != "deepspeed" or layout.zero.stage == 3 or layout.tp * layout.pp * layout.sp > 1:
        return None
    return product_flops_per_token(plan.model) / 3 * batch.micro_batch * batch.accumulation * plan.model.block_size


def _notes(plan: RunPlan, dist: Dist, step_trace: StepTrace) -> dict[str, Any]:
    """Return facts about the run that the trace itself does not contain."""
    return {"rank": dist.rank, "device": dist.device.type, "layout": plan.resolved.layout.name,
            **step_trace.found}
