"""Phase times of each optimizer step without waiting for the device; the slowest rank and the pipeline bubble.

On a CPU a span is the host's time. On an accelerator each span is bracketed by two events on the current stream and
its length is read from them later: a data span that the device's work hides is then short, as it should be.
The device is synchronised once a step, in `end_step`, so that the step time is the time the work took and not the
time it took to enqueue it.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ezpz_llm.observe.history import OTHER, PHASES, steady

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds. `phases` has every name of PHASES and "other", and adds up to `step_time_s`."""

    step_time_s: float
    phases: dict[str, float]


class _Clock(Protocol):
    def mark(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def synchronize(self) -> None: ...
    def release(self, marks: list[Any]) -> None: ...


class _HostClock:
    """Marks are readings of the host's clock."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        """A CPU's work is done when the call returns."""

    def release(self, marks: list[float]) -> None:
        """Numbers need no recycling."""


class _DeviceClock:
    """Marks are timing events on the device's current stream, used again once they were read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._free: list[Any] = []

    def mark(self) -> Any:
        event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        if self._device.type == "mps":
            self._module.synchronize()
        else:
            self._module.synchronize(self._device)

    def release(self, marks: list[Any]) -> None:
        self._free += marks


class StepTimeline:
    """Times the phases of training steps on one rank.

    A step is `begin_step()`, any number of `span(phase)` that do not overlap, `end_step()`. A phase entered several
    times (micro-steps) adds up. What happens between steps (validation, checkpoints, samples) is not timed here.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
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
        start = self._clock.mark()
        try:
            with torch.profiler.record_function(phase):
                yield
        finally:
            self._spans.append((phase, start, self._clock.mark()))
            self._inside = None

    def end_step(self) -> None:
        """Wait for the device and close the step.

        Raises:
            RuntimeError: no step was begun.
        """
        if self._started is None:
            raise RuntimeError("end_step without begin_step")
        self._clock.synchronize()
        self._steps.append((time.perf_counter() - self._started, self._spans))
        self._started, self._spans = None, []

    def drain(self) -> list[StepTimes]:
        """The steps closed since the last call, oldest first."""
        steps, self._steps = self._steps, []
        return [self._resolve(seconds, spans) for seconds, spans in steps]

    def _resolve(self, step_time_s: float, spans: list[tuple[str, Any, Any]]) -> StepTimes:
        phases = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in spans:
            phases[phase] += self._clock.seconds(start, end)
            self._clock.release([start, end])
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
        return statistics.fmean(self.idle)


class BubbleMeter:
    """Collects this rank's steps; `bubble` puts all ranks' together."""

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self._busy, self._span = array("d"), array("d")

    def add(self, times: StepTimes) -> None:
        """Keep a step's time in data, forward and backward, and the time until the optimizer's phase."""
        phases = times.phases
        self._busy.append(phases["data"] + phases["forward"] + phases["backward"])
        self._span.append(times.step_time_s - phases["optimizer"])

    def bubble(self, accumulation: int) -> Bubble | None:
        """Medians over steady steps; None without a pipeline. Collective.

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
        *busy, span = sums.tolist()
        stages = mesh.pp_size
        return Bubble(tuple(1 - seconds / span for seconds in busy), (stages - 1) / (accumulation + stages - 1))


# The slowest rank of a run, from the spans that every step has anyway.


@dataclass(frozen=True)
class Straggler:
    """The rank that spent longest in data and forward, its seconds a step there, and the median over ranks."""

    rank: int
    seconds: float
    median_s: float


class StragglerMeter:
    """Collects this rank's steps; `straggler` compares all ranks'."""

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self._before_collectives = array("d")

    def add(self, times: StepTimes) -> None:
        """Keep a step's time in data and forward."""
        self._before_collectives.append(times.phases["data"] + times.phases["forward"])

    def straggler(self) -> Straggler | None:
        """The slowest rank ahead of its collectives, over steady steps; None for one rank. A collective."""
        if self._dist.world_size == 1 or not self._before_collectives:
            return None
        medians = torch.zeros(self._dist.world_size, device=self._dist.device)
        medians[self._dist.rank] = statistics.median(steady(self._before_collectives))
        torch.distributed.all_reduce(medians)
        seconds = medians.tolist()
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return Straggler(slowest, seconds[slowest], statistics.median(seconds))
