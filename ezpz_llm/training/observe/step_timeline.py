"""Times of a step's phases, on the host or by device events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ezpz_llm.training.observe.history import OTHER, PHASES

_LEFT_OUT = "left out"


@dataclass(frozen=True)
class StepTimes:
    """Times of a step in seconds. `phases` has all PHASES and "other", which sum to `step_time_s`."""

    step_time_s: float
    phases: dict[str, float]


class StepTimeline:
    """Timer of the phases of training steps on one rank.

    A step consists of `begin_step()`, non-overlapping `span(phase)` contexts, and `end_step()`. Spans of the same
    phase (micro-steps) are summed. Work between steps (validation, checkpoints, samples) is not included. `pause()`
    and `leave_out()` exclude such work inside a step.

    On a CPU, times are wall-clock times. On an accelerator, each span and step is enclosed in two events on the
    current stream, whose elapsed time is read later. A data span that overlaps with device work is therefore short,
    and the step time is the execution time, not the time to enqueue kernels.

    `end_step` waits for the previous step only, so that the device always has work queued and the CPU is at most
    one step ahead.

    Args:
        waits: `end_step` waits for its own step, so that a trace contains the step's kernels.
    """

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device = device
        self._waits = waits
        self._started: Any = None
        self._inside: str | None = None
        self._marked: Any = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps: list[tuple[Any, Any, list[tuple[str, Any, Any]], int]] = []
        self._last: Any = None

    def begin_step(self) -> None:
        """Start a step. Discards a step that an exception has interrupted."""
        self._spans, self._inside = [], None
        self._started = self._marked = self._now()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time in this context to `phase`, one of PHASES, and mark it in a torch.profiler trace.

        Raises:
            RuntimeError: called outside a step or inside another span.
            ValueError: the phase is not in PHASES.
        """
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}: one of {', '.join(PHASES)}")
        if self._started is None or self._inside is not None:
            raise RuntimeError(f"span {phase!r} inside {self._inside!r}, or outside a step")
        self._inside = phase
        start = self._now()
        try:
            with torch.profiler.record_function(phase):
                yield
        finally:
            self._marked = self._now()
            self._spans.append((phase, start, self._marked))
            self._inside = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time in this context, with its spans, from the step. Ignored inside a span or a pause."""
        if self._started is None or self._inside is not None:
            yield
            return
        self.mark()
        self._inside = _LEFT_OUT
        try:
            yield
        finally:
            self._inside = None
            self.leave_out()

    def mark(self) -> None:
        """Set the start of the time that the next `leave_out` excludes."""
        self._marked = self._now()

    def leave_out(self) -> None:
        """Exclude the time since the last span, `mark`, `leave_out`, or step began. Ignored inside a span."""
        if self._started is not None and self._inside is None:
            start, self._marked = self._marked, self._now()
            self._spans.append((_LEFT_OUT, start, self._marked))

    @property
    def is_inside(self) -> bool:
        """True inside a span or a pause."""
        return self._inside is not None

    def end_step(self, steps: int = 1) -> None:
        """End the step, and wait until the device has finished the previous step.

        Args:
            steps: number of optimizer steps since `begin_step`; the recorded times are means.

        Raises:
            RuntimeError: `begin_step` was not called.
        """
        if self._started is None:
            raise RuntimeError("end_step without begin_step")
        if self._inside == _LEFT_OUT:
            self._inside = None
            self.leave_out()
        before, self._last = self._last, self._now()
        self._steps.append((self._started, self._last, self._spans, steps))
        self._started, self._spans = None, []
        if self._waits:
            self.wait()
        elif before is not None and self._device.type != "cpu":
            before.synchronize()

    def set_steps(self, steps: int) -> None:
        """Change the number of optimizer steps of the last `end_step`, before its times are drained."""
        self._steps[-1] = (*self._steps[-1][:-1], steps)

    def wait(self) -> None:
        """Wait until the device has finished the last ended step."""
        if self._last is not None and self._device.type != "cpu":
            self._last.synchronize()

    def drain(self) -> list[StepTimes]:
        """Return the times of the steps that ended since the last call, oldest first. Waits for the last step."""
        self.wait()
        steps, self._steps = self._steps, []
        return [self._resolve(*step) for step in steps]

    def _now(self) -> Any:
        """Return the time on a CPU, else an event on the device's current stream, which takes a microsecond."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _resolve(self, began: Any, ended: Any, spans: list[tuple[str, Any, Any]], steps: int) -> StepTimes:
        phases = dict.fromkeys((*PHASES, _LEFT_OUT), 0.0)
        for phase, start, end in spans:
            phases[phase] += self._seconds(start, end) / steps
        # At least the resolution of a device's events, since rates divide by it.
        step_time_s = max(self._seconds(began, ended) / steps - phases.pop(_LEFT_OUT), 5e-7)
        phases[OTHER] = step_time_s - sum(phases.values())
        return StepTimes(step_time_s, phases)

    def _seconds(self, start: Any, end: Any) -> float:
        return float(end - start if self._device.type == "cpu" else start.elapsed_time(end) / 1e3)
