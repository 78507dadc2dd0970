"""Phase times of each optimizer step without waiting for the device; the slowest rank and the pipeline bubble.

On a CPU a span is the host's time. On an accelerator each span is bracketed by two events on the current stream and
its length is read from them later: a data span that the device's work hides is then short, as it should be.
The device is synchronised once a step, in `end_step`, so that the step time is the time the work took and not the
time it took to enqueue it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm.dist.agree import all_gather
from ezpz_llm.dist.device import synchronize
from ezpz_llm.observe.history import OTHER, PHASES, steady

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds. `phases` has every name of PHASES and "other", and adds up to `step_time_s`."""

    step_time_s: float
    phases: dict[str, float]


class StepTimeline:
    """Times the phases of training steps on one rank.

    A step is `begin_step()`, any number of `span(phase)` that do not overlap, `end_step()`. A phase entered several
    times (micro-steps) adds up. What happens between steps (validation, checkpoints, samples) is not timed here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: float | None = None
        self._inside: str | None = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps: list[tuple[float, list[tuple[str, Any, Any]]]] = []

    def begin_step(self) -> None:
        """Start a step. One that an exception cut short before is forgotten."""
        self._spans, self._inside = [], None
        self._started = time.perf_counter()

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

    def end_step(self) -> None:
        """Wait for the device and close the step.

        Raises:
            RuntimeError: no step was begun.
        """
        if self._started is None:
            raise RuntimeError("end_step without begin_step")
        synchronize(self._device)
        self._steps.append((time.perf_counter() - self._started, self._spans))
        self._started, self._spans = None, []

    def drain(self) -> list[StepTimes]:
        """The steps closed since the last call, oldest first."""
        steps, self._steps = self._steps, []
        return [self._resolve(seconds, spans) for seconds, spans in steps]

    def _mark(self) -> Any:
        """A reading of the host's clock; on a device an event on its current stream, which takes a microsecond."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _resolve(self, step_time_s: float, spans: list[tuple[str, Any, Any]]) -> StepTimes:
        phases = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in spans:
            phases[phase] += end - start if self._device.type == "cpu" else start.elapsed_time(end) / 1e3
        phases[OTHER] = step_time_s - sum(phases.values())
        return StepTimes(step_time_s, phases)


# How much of a pipeline's time its stages stand idle, from the spans that every step has anyway.


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


def pipeline_bubble(dist: Dist, busy: Sequence[float], span: Sequence[float], accumulation: int) -> Bubble | None:
    """Medians over steady steps; None without a pipeline. Collective.

    The first stage ends last: until then its time is the pipeline's. The other stages wait for it in the
    optimizer's phase, for the sum of gradients or their norm, so that their own clocks do not tell.

    Args:
        busy, span: of this rank's steps, the time in data, forward and backward, and until the optimizer's phase.
    """
    mesh = dist.mesh
    if mesh.pp_size == 1 or not busy:
        return None
    sums = torch.zeros(mesh.pp_size + 1, device=dist.device)
    sums[mesh.pp_rank] = statistics.median(steady(busy))
    if mesh.pp_rank == 0:
        sums[-1] = statistics.median(steady(span))
    torch.distributed.all_reduce(sums)
    *stages, whole = sums.tolist()
    return Bubble(tuple(1 - seconds / whole for seconds in stages),
                  (mesh.pp_size - 1) / (accumulation + mesh.pp_size - 1))


# The slowest rank of a run, from the spans that every step has anyway.


@dataclass(frozen=True)
class Straggler:
    """The rank that spent longest in data and forward, its seconds a step there, and the median over ranks."""

    rank: int
    seconds: float
    median_s: float


def slowest_rank(dist: Dist, before_collectives: Sequence[float]) -> Straggler | None:
    """The slowest rank ahead of its collectives, over steady steps; None for one rank. Collective.

    Args:
        before_collectives: of this rank's steps, the time in data and forward.
    """
    if dist.world_size == 1 or not before_collectives:
        return None
    seconds = all_gather(dist, statistics.median(steady(before_collectives)))
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return Straggler(slowest, seconds[slowest], statistics.median(seconds))
