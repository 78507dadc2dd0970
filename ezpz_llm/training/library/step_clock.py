"""Timer of a script's steps, from record to record, without evaluation, checkpoints, and work before training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ezpz_llm.training.observe import StepTimeline, WallClock


class StepClock:
    """Timer of the steps between two calls of `record`, for the timeline and for the wall time of the run.

    Args:
        timeline: phases of the steps, on the device.
        wall: breakdown of the wall time, to which the steps are added as "training".
    """

    def __init__(self, timeline: StepTimeline, wall: WallClock) -> None:
        self.timeline = timeline
        self._wall = wall
        # In seconds of time.perf_counter. `_began` is later than the start of the step by the time left out of it.
        self._began = self._marked = 0.0
        self._pause: str | None = None
        self._waits = False
        self._counted_steps = 0
        self._guessed_steps = 0

    def begin(self, *, waits: bool = False) -> None:
        """Start a step, or let its first phase start it if `waits` is True."""
        self._waits = waits
        self._began = self._marked = time.perf_counter()
        self._counted_steps = 0
        self.timeline.begin_step()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time in this context to a phase of the step, or to the enclosing phase if there is one."""
        if self.timeline.is_inside:
            yield
            return
        if self._waits:
            self.begin()
        with self.timeline.span(phase):
            yield
        self._marked = time.perf_counter()
        if phase == "optimizer":
            self.count_step()

    def count_step(self) -> None:
        """Count an optimizer step, as an optimizer phase does."""
        self._counted_steps += 1

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Leave the time in this context out of the step; in the wall time it is `name`."""
        if self.timeline.is_inside:
            yield
            return
        self.mark()
        self._pause = name
        try:
            with torch.profiler.record_function(name), self.timeline.pause():
                yield
        finally:
            self._pause = None
            self._account(name)

    def mark(self) -> None:
        """Set the start of the time that the next `leave_out` leaves out."""
        self._marked = time.perf_counter()
        self.timeline.mark()

    def leave_out(self, name: str) -> None:
        """Leave the time since the last phase, `mark` or `leave_out` out of the step, as `pause` does."""
        if not self.timeline.is_inside:
            self.timeline.leave_out()
            self._account(name)

    def _account(self, name: str) -> None:
        """Count the time since the mark as `name` instead of training."""
        now = time.perf_counter()
        self._add(name, now - self._marked)
        self._began += now - self._marked
        self._marked = now

    def end(self, steps: int, *, is_first: bool) -> None:
        """End a step, and record its time as the mean over `steps` optimizer steps, or fewer if fewer were counted.

        Without counted steps the first number is a guess: a script may record step 500 first because it records
        every 500th step, or because it resumes from step 499. Then the distance to the second record decides.
        """
        if self._guessed_steps:
            self.timeline.set_steps(min(self._guessed_steps, steps))
        self._guessed_steps = steps if is_first and steps > 1 and not self._counted_steps else 0
        self.timeline.end_step(min(steps, self._counted_steps or steps))
        if self._pause is not None:
            self._account(self._pause)
        self._add("training", time.perf_counter() - self._began)

    @property
    def is_sure(self) -> bool:
        """False if the next `end` may change the number of steps of the last one."""
        return not self._guessed_steps

    def drained(self) -> None:
        """Accept that the times of all ended steps have been read."""
        self._guessed_steps = 0

    def _add(self, name: str, seconds: float) -> None:
        self._wall.spans[name] = self._wall.spans.get(name, 0.0) + seconds
