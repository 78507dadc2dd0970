"""Run of a user's training script: setup, recorded steps, and the final files of the run directory."""

from __future__ import annotations

import atexit
import math
import os
import statistics
import sys
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError, exit_after_uncaught_exception, unknown_name_error
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.core.rundir.summary_record import Straggler
from ezpz_llm.launcher.basics.variables import ENDING, EVALUATING, RENDEZVOUS, SAVING, STARTING, TRAINING
from ezpz_llm.training.dist import Dist, Heartbeat, Mesh
from ezpz_llm.training.dist.agreement import run_together
from ezpz_llm.training.dist.setup import setup as set_up_rank
from ezpz_llm.training.library.recorded_values import as_figure, as_figures, as_scalar, as_step, as_tokens
from ezpz_llm.training.library.step_clock import StepClock
from ezpz_llm.training.observe import (
    MetricsLog,
    StepTimeline,
    StepWork,
    WallClock,
    final_text,
    plot_run,
    run_environment,
    summarize,
    wants_color,
)
from ezpz_llm.training.observe.history import PHASES, History, rename_old_metrics, steady_steps, whole_history
from ezpz_llm.training.observe.machine_load import load_now
from ezpz_llm.training.report.run_page import write_own_page

_PHASES_BETWEEN_STEPS = {"evaluation": EVALUATING, "checkpoints": SAVING}
"""Phases between steps, which are not part of step times, and the heartbeat phase for each."""
_LOG_EVERY = 10


class WrappedModel(Protocol):
    """Model of `ezpz_llm.wrap`, as `Run.record` reads it."""

    grad_norm: Tensor | None

    @property
    def lr(self) -> float:
        """Learning rate of the model's optimizer."""


@dataclass
class Run:
    """State of a run on this rank.

    As a context manager, it calls `finish` on exit; after an exception it exits without waiting for other ranks.
    """

    dist: Dist
    timeline: StepTimeline
    heartbeat: Heartbeat
    clock: WallClock
    log_every: int = _LOG_EVERY
    metrics: MetricsLog | None = None
    models: weakref.WeakSet[WrappedModel] = field(default_factory=weakref.WeakSet)
    trainings: list[object] = field(default_factory=list)
    """Trainings of other libraries that are running. They use the process group, also after `finish`."""
    first_step: int = 0
    step: int = 0
    """Last recorded step, or the step of the loaded checkpoint."""
    _buffered: int = 0

    def __post_init__(self) -> None:
        self.step_clock = StepClock(self.timeline, self.clock)

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self.dist.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dist.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node, from 0."""
        return self.dist.info.local_rank

    @property
    def is_main(self) -> bool:
        """True for rank 0."""
        return self.dist.is_main

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.dist.device

    @property
    def mesh(self) -> Mesh:
        """Process groups and coordinates of the ranks."""
        return self.dist.mesh

    @property
    def run_dir(self) -> Path:
        """Run directory, the same on every rank."""
        return self.dist.run_dir.path

    def begin_step(self) -> None:
        """Start timing the next step; with a wrapped model, its first phase starts it.

        Until then, scripts create their data loader or skip the samples of earlier steps.
        """
        self.step_clock.begin(waits=bool(self.models))

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Add the time in this context to a phase of the step, or to the enclosing phase if there is one."""
        return self.step_clock.span(phase)

    def leave_out(self, name: str) -> None:
        """Leave the time since the last phase of the step out of it, as `phase(name)` does for "evaluation"."""
        self.step_clock.leave_out(name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See `ezpz_llm.phase`."""
        if name in PHASES:
            return self.step_clock.span(name)
        if name not in _PHASES_BETWEEN_STEPS:
            raise unknown_name_error("phase", name, (*PHASES, *_PHASES_BETWEEN_STEPS), where="ezpz_llm.phase")
        self.heartbeat.beat(_PHASES_BETWEEN_STEPS[name], self.step)
        return self.step_clock.pause(name)

    def record(self, step: Any, loss: Any, tokens: Any, lr: Any, grad_norm: Any,
               figures: dict[str, Any]) -> None:
        """See `ezpz_llm.record`."""
        step = as_step(step)
        if step <= self.step:
            raise UserError(f"step {step} is recorded after step {self.step}", where="ezpz_llm.record",
                            instead="record steps in increasing order, from 1 or after the step of the checkpoint")
        if len(models := list(self.models)) == 1:
            lr = models[0].lr if lr is None else lr
            grad_norm = models[0].grad_norm if grad_norm is None else grad_norm
        loss = as_scalar(loss, "loss", self.device)
        norm = as_scalar(math.nan if grad_norm is None else grad_norm, "grad_norm", self.device)
        tokens, lr, figures = as_tokens(tokens), as_figure(lr, "lr"), as_figures(figures)
        is_first = self.metrics is None
        if self.metrics is None:
            self.metrics = self._open()
        self.step_clock.end(step - self.step, is_first=is_first)
        if is_first:  # building and wrapping the model
            self.clock.add_rest("set-up")
        # Tensor-parallel ranks process the same tokens: count them once.
        share = tokens if tokens is None else tokens / self.mesh.tp_size
        self.metrics.record(step, loss, norm, None, tokens=share)
        self.metrics.record_task(step, lr=lr, **figures)
        self.step, self._buffered = step, self._buffered + 1
        self.heartbeat.beat(TRAINING, step)
        if self.step_clock.is_sure and (self._buffered >= self.log_every or step == self.first_step + 1):
            self.flush()
        self.step_clock.begin()

    def rewind(self, step: int) -> None:
        """Continue after `step`, the step of a loaded checkpoint; drop later lines of metrics.jsonl. Collective."""
        if self.metrics is not None:
            self.flush()
            self.metrics.rewind(step)
            self.first_step = min(self.first_step, step)
        self.step = step
        self.begin_step()

    def start_over(self) -> None:
        """Rename the metrics of an earlier attempt, which saved no checkpoint. Collective."""
        def rename() -> None:
            """Rename them if there are any."""
            if self.dist.run_dir.metrics.exists():
                kept = rename_old_metrics(self.dist.run_dir)
                print(f"note: the metrics of the earlier attempt are kept as {kept}", file=sys.stderr, flush=True)

        if self.metrics is None:
            run_together(self.dist, rename, on_main=True)

    def flush(self) -> None:
        """Write the buffered lines. Collective."""
        if self.metrics is not None:
            with self.clock.span("logging"):
                self.metrics.flush(self.timeline)
            self.step_clock.drained()
            self._buffered = 0

    def finish(self) -> None:
        """See `ezpz_llm.finish`."""
        self.heartbeat.beat(ENDING, self.step)
        self.flush()
        optional = self.dist.optional
        straggler = None if self.metrics is None else optional.attempt_together(
            "the comparison of ranks", self.metrics.straggler)
        if self.is_main and self.metrics is not None:
            optional.attempt("the summary", lambda: self._report(straggler))
        for failure in self.dist.side.close():
            print(f"warning: {failure}", file=sys.stderr, flush=True)
        self.dist.owns_group &= not self.trainings
        self.dist.close()

    def _report(self, straggler: Straggler | None) -> None:
        """Print plots and the closing summary, and record the summary in run.json."""
        run_dir, side = self.dist.run_dir, self.dist.side
        side.update_record(run_dir, steps=self.step,
                           config={**(read_record(run_dir).config or {}), "steps": self.step})
        history = whole_history(run_dir, side)
        summary = summarize(run_dir, self._work(history), self.clock.split(), first_step=self.first_step,
                            straggler=straggler if straggler and straggler.seconds else None, history=history)
        charts = self.dist.optional.attempt("plotting", lambda: plot_run(
            run_dir, color=wants_color(), history=history, side=side, unit=""))
        if charts is not None:
            print("\n" + charts)
        side.update_record(run_dir, summary=summary, load_at_end=load_now())
        side.attempt("report.html", lambda: write_own_page(run_dir, history))
        if summary is not None:
            print(final_text(summary, run_dir), end="", flush=True)

    def _open(self) -> MetricsLog:
        """Open the metrics log, to continue after the step of the loaded checkpoint, if any."""
        self.first_step = self.step
        world_size = self.dist.world_size
        return run_together(self.dist, lambda: MetricsLog(
            self.dist.run_dir, self.dist, StepWork(0, 1, world_size, world_size, 0), total_steps=0,
            first_step=self.first_step, console=False))

    def _work(self, history: History) -> StepWork:
        """Return the work of a step, from the median of the recorded tokens."""
        timed = steady_steps(history)
        rates = zip(timed.column("tokens_per_second"), timed.column("step_time_s"), strict=True)
        tokens = [rate * seconds for rate, seconds in rates if math.isfinite(rate * seconds)]
        median = round(statistics.median(tokens)) if tokens else 0
        return StepWork(1, 1, 1, self.world_size, median)

    def end_after_exception(self, error: BaseException) -> None:
        """End without waiting for other ranks, which may be in another collective, or have failed too."""
        if self.world_size == 1:
            self.flush()
            self.dist.side.close()
        self.dist.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            finish()
        elif is_current(self):
            _forget()
            self.end_after_exception(error)


_CURRENT: list[Run] = []
"""Run of this process, for the functions below; empty before `setup` and after `finish`."""
_ENDED: list[bool] = []
"""Not empty if a run of this process has ended."""


def is_current(run: Run) -> bool:
    """Return True until `finish` ends the run."""
    return bool(_CURRENT) and _CURRENT[0] is run


def current(call: str) -> Run:
    """Return the run of this process.

    Raises:
        UserError: `setup` has not been called, or `finish` has.
    """
    if not _CURRENT:
        raise UserError("finish() has ended the run" if _ENDED else "there is no run in this process",
                        where=f"ezpz_llm.{call}",
                        instead="call ezpz_llm.setup() before, and finish() after all steps")
    return _CURRENT[0]


def _forget() -> None:
    _CURRENT.clear()
    _ENDED.append(True)


def setup(*, device: str | None = None, run_dir: str | Path | None = None, name: str | None = None,
          log_every: int = _LOG_EVERY) -> Run:
    """Set up this process as a rank of launch, torchrun, srun or mpiexec, or as a single process. Collective.

    Replaces `init_process_group`: creates the same process group, or uses the existing one. Further calls return
    the same run.

    Args:
        device: "cuda", "xpu", "mps" or "cpu"; by default the best available.
        run_dir: run directory; by default launch's, or runs/NAME-STAMP.
        name: NAME in the default run directory; by default the script's name, or "notebook".
        log_every: number of recorded steps whose values are reduced across ranks and written together.

    Raises:
        UserError: for example because rank variables are invalid, the device is missing, or another run uses the
            directory.
    """
    if _CURRENT:
        return _CURRENT[0]
    if log_every < 1:
        raise UserError(f"log_every is {log_every}", where="ezpz_llm.setup", instead="1 or more")
    clock, heartbeat = WallClock(), Heartbeat(os.environ)
    heartbeat.beat(RENDEZVOUS)
    with clock.span("set-up"):
        dist = set_up_rank(device=device, run_dir=None if run_dir is None else Path(run_dir),
                           name=name or _default_name(Path(sys.argv[0]).stem), keeps_memory=False)
        dist.ensure_group()
        if dist.owns_group:
            atexit.register(_destroy_gloo_group)
        if dist.world_size > 1:
            exit_after_uncaught_exception()
        environment = run_environment(dist)
        if dist.is_main:
            dist.side.update_record(dist.run_dir, environment=environment, config={"log_every": log_every})
    heartbeat.beat(STARTING)
    run = Run(dist, StepTimeline(dist.device), heartbeat, clock, log_every)
    run.begin_step()
    _CURRENT.append(run)
    return run


def _destroy_gloo_group() -> None:
    """Destroy the process group at exit, if the script has not called `finish`.

    Else gloo's threads may free a tensor while the interpreter shuts down, which aborts the process (exit code 134
    in 3 of 32 launches on a busy node, and in 0 of 80 with this function). Not after an exception, since a thread
    may wait for another rank then.
    """
    if (torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo"
            and not hasattr(sys, "last_value")):
        torch.distributed.destroy_process_group()


def _default_name(program: str) -> str:
    """Return the default name for a run of `program`."""
    return "notebook" if program == "ipykernel_launcher" else program or "run"


def phase(name: str) -> AbstractContextManager[None]:
    """Add the time in this context to a phase of the step, or to a phase between steps.

    Args:
        name: "data", "forward", "backward" or "optimizer" within a step (a wrapped model times the last three
            itself); "evaluation" or "checkpoints" between `record` and the next batch, outside of step times.

    Raises:
        UserError: the name is unknown, or there is no run.
    """
    return current("phase").phase(name)


def record(step: int, *, loss: float | Tensor, tokens: float | Tensor | None = None,
           lr: float | Tensor | None = None, grad_norm: float | Tensor | None = None,
           **figures: float | Tensor | None) -> None:
    """Record a finished step as a line of metrics.jsonl, with the time since the last call. Collective.

    Does not synchronize with the device. The loss stays on the device until all ranks reduce their values, every
    `log_every` calls. Each number may also be a NumPy number, or a tensor or array with one element. NaN and Inf
    are written as null.

    Args:
        step: increasing whole number, from 1. If only every k-th step is recorded, times are means over k steps.
        loss: loss of this rank; the line has the mean over ranks, in fp32.
        tokens: tokens of this rank in the step, or samples if there are no tokens. Throughput is summed over ranks.
        lr, grad_norm: by default the wrapped model's, if there is exactly one.
        figures: additional values of rank 0 for the line, such as val_loss.

    Raises:
        UserError: there is no run, a value is not a number, the step is not above the last recorded one, a figure
            has the name of another value of the line, or the run directory belongs to another run.
    """
    current("record").record(step, loss, tokens, lr, grad_norm, figures)


def finish() -> None:
    """Write buffered lines, plot loss and throughput, and destroy the process group that `setup` created.

    Collective. Completes run.json, plots/ and report.html. A second call does nothing. While an exception is
    handled, as in a `finally` block, a run of several ranks ends without waiting for other ranks: the steps since
    the last reduction are not written.

    Raises:
        UserError: `setup` has not been called.
    """
    if _ENDED and not _CURRENT:
        return
    run, error = current("finish"), sys.exc_info()[1]
    _forget()
    if error is None or run.world_size == 1:
        run.finish()
    else:
        run.end_after_exception(error)
