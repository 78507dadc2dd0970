"""Wall time of a process by activity."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class WallClock:
    """Breakdown of a run's wall time in seconds. Time outside of all spans is "other".

    `marks` holds the parts of the startup with the epoch times of their ends. Epoch times are computed from the
    system clock at the start, since that clock may be adjusted during the run.
    """

    started: float = field(default_factory=time.perf_counter)
    epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())
    spans: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def passed(self, name: str) -> None:
        """Record that a part of the startup has ended."""
        self.marks.append((name, self.now()))

    def now(self) -> float:
        """Return the epoch time."""
        return self.epoch + time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time in this context to `name`, and mark it in a torch.profiler trace."""
        begin = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self.spans[name] = self.spans.get(name, 0.0) + time.perf_counter() - begin

    def add_rest(self, name: str) -> None:
        """Add the time so far that is outside of all spans to `name`."""
        self.spans[name] = self.spans.get(name, 0.0) + max(0.0, self.split()["other"])

    def split(self) -> dict[str, float]:
        """Return the seconds by name so far. The sum is the run's wall time."""
        total = time.perf_counter() - self.started
        return {**self.spans, "other": total - sum(self.spans.values())}
