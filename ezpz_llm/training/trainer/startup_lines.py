"""Lines that a long start-up prints until its first step ends, so that no run is silent for minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ezpz_llm.core.base import print_lines
from ezpz_llm.training.observe.throughput import format_duration

_FIRST_S, _EVERY_S = 30.0, 60.0
_NEXT = {"imports": "waiting for the other ranks", "rendezvous": "preparing the data",
         "data": "measuring the device", "measuring the device": "building the model and its engine",
         "engine": "loading the checkpoint, if any, and opening the log", "the rest": "running the first step"}
"""Work that follows each mark of the start-up."""


@contextmanager
def startup_lines(marks: Sequence[tuple[str, float]], first_s: float = _FIRST_S,
                  every_s: float = _EVERY_S) -> Iterator[None]:
    """Print what the start-up does after `first_s` seconds, and then every `every_s`, until the first step ends.

    Args:
        marks: parts of the start-up that have ended (`WallClock.marks`), which grow during this context.
    """
    began, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        """Print lines until the last mark has no further work of the start-up."""
        wait_s = first_s
        while not ended.wait(wait_s) and marks and (work := _NEXT.get(marks[-1][0])):
            print_lines(f"start-up   {format_duration(time.monotonic() - began)}: {work}")
            wait_s = every_s

    threading.Thread(target=watch, name="start-up", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
