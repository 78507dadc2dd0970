"""Phase times of each step, and `metrics.jsonl`: one object a step, written so that no step waits for a number.

A line has `step` (from 1), `loss` (nats a token, mean over the step's tokens), `lr`, `grad_norm` (before clipping),
`step_time_s`, `tokens_per_second`, `tokens_per_second_per_device` (both where the tokens of a step are known),
`data_s`, `forward_s`, `backward_s`, `optimizer_s`, `other_s` (rank 0's, adding up to the step time); `mfu` where
the device's peak is known; `val_loss`, `val_tokens`, `hellaswag_acc` and `hellaswag_acc_norm` on steps that
evaluated so; on steps that are flushed at once `lr_G`, `grad_norm_G` and `update_ratio_G` (norm of the update over
norm of the parameters) of the groups G `decayed` and `others`; `skipped` on steps that changed nothing. A loss or
norm that is not finite is null, since JSON has no NaN.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather_number, reduce
from ezpz_llm.observe.history import OTHER, PHASES, finite, steady, trim_history
from ezpz_llm.observe.throughput import Progress, StepWork
from ezpz_llm.observe.trackers import Tracking
from ezpz_llm.rundir import RunDir


@dataclass(frozen=True)
class StepTimes:
    """Times of a step, in seconds. `phases` has every name of PHASES and "other", and adds up to `step_time_s`."""

    step_time_s: float
    phases: dict[str, float]


class StepTimeline:
    """Times the phases of training steps on one rank.

    A step is `begin_step()`, any number of `span(phase)` that do not overlap, `end_step()`. A phase entered several
    times (micro-steps) adds up. What happens between steps (validation, checkpoints, samples) is not timed here.

    On a CPU a span is the host's time. On an accelerator each span and each step is bracketed by two events on the
    current stream and its length is read from them later: a data span that the device's work hides is then short,
    as it should be, and the step time is the time the work took and not the time it took to enqueue it.

    The device never runs out of work for being timed: `end_step` waits for the step before the one that it closes.
    So the host is one step ahead, and not as many as there are until somebody reads a loss.

    Args:
        waits: for each step itself, so that its kernels end before `end_step` does, as a trace needs it.
    """

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device = device
        self._waits = waits
        self._started: Any = None
        self._inside: str | None = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps: list[tuple[Any, Any, list[tuple[str, Any, Any]], int]] = []
        self._last: Any = None

    def begin_step(self) -> None:
        """Start a step. One that an exception cut short before is forgotten."""
        self._spans, self._inside = [], None
        self._started = self._mark()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Count the time inside to `phase`, one of PHASES; named so in a torch.profiler trace, too.

        Raises:
            RuntimeError: outside a step, or inside another span.
            ValueError: a phase that is not in PHASES.
        """
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}: one of {', '.join(PHASES)}")
        if self._started is None or self._inside is not None:
            raise RuntimeError(f"span {phase!r} inside {self._inside!r}, or outside a step")
        self._inside = phase
        start = self._mark()
        try:
            with torch.profiler.record_function(phase):
                yield
        finally:
            self._spans.append((phase, start, self._mark()))
            self._inside = None

    @property
    def is_inside(self) -> bool:
        """True inside a span."""
        return self._inside is not None

    @property
    def is_untouched(self) -> bool:
        """True if no span was entered since the step began."""
        return not self._spans

    def end_step(self, steps: int = 1) -> None:
        """Close the step, and wait until the device has ended the one before.

        Args:
            steps: so many were made since `begin_step`; what is kept are means over them.

        Raises:
            RuntimeError: no step was begun.
        """
        if self._started is None:
            raise RuntimeError("end_step without begin_step")
        before, self._last = self._last, self._mark()
        self._steps.append((self._started, self._last, self._spans, steps))
        self._started, self._spans = None, []
        if self._waits:
            self.wait()
        elif before is not None and self._device.type != "cpu":
            before.synchronize()

    def wait(self) -> None:
        """Wait until the device has ended the last step that was closed."""
        if self._last is not None and self._device.type != "cpu":
            self._last.synchronize()

    def drain(self) -> list[StepTimes]:
        """The steps closed since the last call, oldest first; waits for the last of them."""
        self.wait()
        steps, self._steps = self._steps, []
        return [self._resolve(*step) for step in steps]

    def _mark(self) -> Any:
        """A reading of the host's clock; on a device an event on its current stream, which takes a microsecond."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _resolve(self, began: Any, ended: Any, spans: list[tuple[str, Any, Any]], steps: int) -> StepTimes:
        phases = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in spans:
            phases[phase] += self._seconds(start, end) / steps
        step_time_s = self._seconds(began, ended) / steps
        phases[OTHER] = step_time_s - sum(phases.values())
        return StepTimes(step_time_s, phases)

    def _seconds(self, start: Any, end: Any) -> float:
        return float(end - start if self._device.type == "cpu" else start.elapsed_time(end) / 1e3)


@dataclass
class WallClock:
    """Seconds of the run's wall time by what they were spent on; what no span covers is "other".

    `marks` are the ends of the start-up's parts, with their epoch times: by the clock as it was at the start, which
    may be set meanwhile.
    """

    started: float = field(default_factory=time.perf_counter)
    epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())
    spans: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def passed(self, name: str) -> None:
        """Note that a part of the start-up has just ended."""
        self.marks.append((name, self.now()))

    def now(self) -> float:
        """The epoch time."""
        return self.epoch + time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `name`, its mark in a torch.profiler trace, too."""
        begin = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self.spans[name] = self.spans.get(name, 0.0) + time.perf_counter() - begin

    def split(self) -> dict[str, float]:
        """Seconds by name so far, adding up to the run's wall time."""
        total = time.perf_counter() - self.started
        return {**self.spans, "other": total - sum(self.spans.values())}


# How much of a pipeline's time its stages stand idle, and the slowest rank: from the spans that every step has.
@dataclass(frozen=True)
class Bubble:
    """Idle shares of the time from a step's begin to the end of its last backward pass, by stage.

    `expected` is (p-1)/(m+p-1), the share where all stages take equally long and sending costs nothing (Huang et
    al. 2019, arXiv:1811.06965; the same for the 1F1B schedule). What exceeds it is imbalance and communication.
    """

    idle: tuple[float, ...]
    expected: float

    @property
    def mean(self) -> float:
        """Over the stages."""
        return statistics.fmean(self.idle)


@dataclass(frozen=True)
class Straggler:
    """The rank that spent longest in data and forward, its seconds a step there, and the median over ranks."""

    rank: int
    seconds: float
    median_s: float


class Measured(Protocol):
    """Numbers of one step of which each rank has a part, `sums`; the line gets what their totals mean."""

    sums: torch.Tensor

    def describe(self, totals: list[Any], grad_norm: float | None) -> dict[str, float]:
        """The members of a step's line that follow from the sums over all ranks."""


@dataclass
class _Step:
    """A finished step that waits to be written: `values` has this rank's loss, norm and tokens, where it `counts`
    them; `figures` has the rest."""

    lr: float | None
    values: torch.Tensor
    measured: Measured | None
    counts: bool = False
    figures: dict[str, float | None] = field(default_factory=dict)


class MetricsLog:
    """Collects every step's loss and norm on the device; `flush` reduces them over ranks and writes the lines.

    All ranks hold one and call `record`, `flush` and `straggler` at the same steps; rank 0 writes. `flush` is
    `reduce` and `write`, between which `record_task` can still add to the last line. A run that goes
    on after `first_step` appends to its directory's lines, of which later ones are dropped first (trim_history).

    Args:
        work: what one step is, for the rates.
        total_steps: the run's last step, for the progress line.
        flush_every: `due` is true at multiples of it, and after the first step so that a user sees it at once.
        console: print the progress line on rank 0.
        tracking: takes the lines of each flush too, on rank 0.

    Raises:
        UserError: on rank 0, a new run in a directory with another run's metrics.
    """

    def __init__(self, run_dir: RunDir, dist: Dist, work: StepWork, *, total_steps: int, first_step: int = 0,
                 flush_every: int = 50, console: bool = True,
                 tracking: Tracking | None = None) -> None:
        self._run_dir = run_dir
        self._dist = dist
        self._work = work
        self._first_step = first_step
        self._flush_every = flush_every
        self._pending: dict[int, _Step] = {}
        self._reduced: list[dict[str, Any]] = []
        # Of each of this rank's steps: in data and forward; in backward besides; and until the optimizer's phase.
        self._before_collectives, self._busy, self._span = array("d"), array("d"), array("d")
        self._progress = Progress(total_steps, work) if console and dist.is_main else None
        self._tracking = tracking
        self._impossible_mfu = False
        if dist.is_main:
            trim_history(run_dir, first_step)

    def record(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float | None,
               measured: Measured | None = None, tokens: float | None = None) -> None:
        """Keep a finished step's local mean loss and global norm (0-d tensors, copied on the device, not read).

        Args:
            measured: what else was found on all ranks in this step.
            tokens: of this rank, where steps are not all as `work` says.
        """
        norm = grad_norm.detach().to(loss.device, non_blocking=True)
        values = torch.stack((loss.detach().float(), norm.float(), torch.full_like(norm, tokens or 0).float()))
        self._pending[step] = _Step(lr, values, measured, counts=tokens is not None)

    def record_validation(self, step: int, val_loss: float, val_tokens: int) -> None:
        """Put a validation result on the line of `step`.

        Raises:
            ValueError: the step was not recorded, or its line is written already.
        """
        if step not in self._pending:
            raise ValueError(f"validation of step {step}, which is not waiting to be written")
        self.record_task(step, val_tokens=val_tokens, val_loss=val_loss if finite(val_loss) else None)

    def record_task(self, step: int, **figures: float | None) -> None:
        """Put further results of an evaluation on the line of `step`, which is recorded and not yet written."""
        (self._pending[step].figures if step in self._pending else self._reduced[-1]).update(figures)

    @property
    def due(self) -> bool:
        """True if the last recorded step is one to flush after."""
        return bool(self._pending) and self.is_due(max(self._pending))

    def is_due(self, step: int) -> bool:
        """True if `step` is one to flush after."""
        return step % self._flush_every == 0 or step == self._first_step + 1

    def tick(self, step: int) -> None:
        """Say how far the run is, if nothing has been printed for a while (rank 0)."""
        if self._progress:
            self._progress.tick(step)

    def erase_live_line(self) -> None:
        """Before something else is printed."""
        if self._progress:
            self._progress.erase()

    def rewind(self, step: int) -> None:
        """The run goes on after an earlier `step`: later lines are dropped."""
        self._first_step = step
        if self._dist.is_main:
            self._dist.side.attempt("metrics.jsonl without the steps that come again",
                                    lambda: trim_history(self._run_dir, step))
        if self._tracking:
            self._tracking.rewind(step)

    def flush(self, timeline: StepTimeline) -> None:
        """Reduce, write and show what was recorded since the last flush. A collective: every rank calls it.

        Raises:
            ValueError: the timeline did not time exactly the recorded steps.
        """
        self.reduce(timeline)
        self.write()

    def reduce(self, timeline: StepTimeline, look: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Reduce what was recorded since the last flush, and write all lines but the last. Collective.

        Args:
            look: is given every line, on every rank, before it is written, and may add to it. Losses and norms are
                the same on all ranks, times are each rank's own.

        Raises:
            ValueError: the timeline did not time exactly the recorded steps.
        """
        times = timeline.drain()
        if len(times) != len(self._pending):
            raise ValueError(f"{len(self._pending)} steps were recorded, {len(times)} were timed")
        if not self._pending:
            return
        lines = [self._line(step, recorded, values, took) for (step, recorded), values, took
                 in zip(self._pending.items(), self._reduce(), times, strict=True)]
        self._add_measured(lines)
        if look is not None:
            for line in lines:
                look(line)
        for took in times:
            phases = took.phases
            self._before_collectives.append(phases["data"] + phases["forward"])
            self._busy.append(phases["data"] + phases["forward"] + phases["backward"])
            self._span.append(took.step_time_s - phases["optimizer"])
        self._pending, self._reduced = {}, lines
        if self._dist.is_main and lines[:-1]:
            self._dist.side.append(self._run_dir.metrics, lines[:-1])

    def write(self) -> None:
        """Write the last line of those reduced, and show them."""
        lines, self._reduced = self._reduced, []
        if not lines or not self._dist.is_main:
            return
        self._dist.side.append(self._run_dir.metrics, lines[-1:])
        if self._tracking:
            self._tracking.write(lines)
        if self._progress:
            self._progress.show(lines)
        first_bad = next((line["step"] for line in lines if not finite(line["loss"])), None)
        if first_bad is not None:
            print(f"warning: the loss is not finite from step {first_bad} on", flush=True)

    def _add_measured(self, lines: list[dict[str, Any]]) -> None:
        """Put what was measured besides on the lines of its steps, summed over ranks in one collective."""
        measured = {step: one.measured for step, one in self._pending.items() if one.measured is not None}
        if not measured:
            return
        sums = reduce(self._dist, torch.stack([found.sums for found in measured.values()]))
        by_step = {line["step"]: line for line in lines}
        for (step, found), values in zip(measured.items(), sums.tolist(), strict=True):
            by_step[step].update(found.describe(values, by_step[step]["grad_norm"]))

    def straggler(self) -> Straggler | None:
        """The slowest rank ahead of its collectives, over steady steps; None for one rank. A collective."""
        if self._dist.world_size == 1 or not self._before_collectives:
            return None
        seconds = all_gather_number(self._dist, statistics.median(steady(self._before_collectives)))
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return Straggler(slowest, seconds[slowest], statistics.median(seconds))

    def bubble(self) -> Bubble | None:
        """Idle time of the pipeline's stages, medians over steady steps; None without a pipeline. A collective.

        The first stage ends last: until then its time is the pipeline's. The other stages wait for it in the
        optimizer's phase, for the sum of gradients or their norm, so that their own clocks do not tell.
        """
        mesh = self._dist.mesh
        if mesh.pp_size == 1 or not self._busy:
            return None
        sums = torch.zeros(mesh.pp_size + 1, device=self._dist.device)
        sums[mesh.pp_rank] = statistics.median(steady(self._busy))
        if mesh.pp_rank == 0:
            sums[-1] = statistics.median(steady(self._span))
        torch.distributed.all_reduce(sums)
        *stages, whole = sums.tolist()
        return Bubble(tuple(1 - seconds / whole for seconds in stages),
                      (mesh.pp_size - 1) / (self._work.accumulation + mesh.pp_size - 1))

    def _reduce(self) -> list[list[float]]:
        """(loss, norm, tokens) of every pending step, averaged over ranks in one collective.

        The mean is over all ranks: tensor-parallel peers hold equal values, and what pipeline and sequence-parallel
        peers hold are parts that average to the loss. Sums are in double precision, where a sum of floats is exact
        and so does not depend on the order in which a backend adds.
        """
        stacked = torch.stack([recorded.values for recorded in self._pending.values()])
        if self._dist.world_size == 1:
            return stacked.tolist()
        stacked = stacked.double()
        torch.distributed.all_reduce(stacked)
        return (stacked / self._dist.world_size).tolist()

    def _line(self, step: int, recorded: _Step, values: list[float], times: StepTimes) -> dict[str, Any]:
        loss, grad_norm, tokens = values
        rates = self._work.rates(times.step_time_s, tokens * self._work.world_size if recorded.counts else None)
        line: dict[str, Any] = {
            "step": step,
            "loss": loss if finite(loss) else None,
            "lr": recorded.lr,
            "grad_norm": grad_norm if finite(grad_norm) else None,
            "step_time_s": times.step_time_s,
            **({} if rates.tokens_per_second is None else {
                "tokens_per_second": rates.tokens_per_second,
                "tokens_per_second_per_device": rates.tokens_per_second_per_device}),
            **{f"{phase}_s": seconds for phase, seconds in times.phases.items()},
        }
        if rates.mfu is not None:
            self._add_mfu(line, rates.mfu)
        return {**line, **recorded.figures}

    def _add_mfu(self, line: dict[str, Any], mfu: float) -> None:
        """An MFU above 1 is left out and reported once: some part of it must be wrong."""
        if mfu <= 1:
            line["mfu"] = mfu
        elif not self._impossible_mfu and self._dist.is_main and self._work.peak is not None:
            self._impossible_mfu = True
            peak = self._work.peak
            print(f"error: step {line['step']} gives an MFU of {mfu:.2f}, which cannot be: the step time, the "
                  f"{self._work.flops_per_token:.4g} FLOPs a token or the peak of {peak.flops:.4g} FLOP/s "
                  f"({peak.precision}, {peak.device}) is wrong; such steps get no mfu", flush=True)
