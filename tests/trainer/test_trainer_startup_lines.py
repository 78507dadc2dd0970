"""Lines that a long start-up prints."""

from __future__ import annotations

import threading

import pytest
from slowness import scaled

from ezpz_llm.training.trainer import startup_lines


def test_a_long_start_up_prints_its_work_until_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    arrived = threading.Semaphore(0)
    monkeypatch.setattr(startup_lines, "print_lines", lambda text: (printed.append(text), arrived.release()))
    marks = [("imports", 0.0), ("rendezvous", 0.0)]
    with startup_lines.startup_lines(marks, 0.01, 0.01):
        assert arrived.acquire(timeout=scaled(60))
        marks.append(("measuring the device", 0.0))
        while "building the model and its engine" not in printed[-1]:
            assert arrived.acquire(timeout=scaled(60))
        marks.append(("first step", 0.0))
        [watcher] = [thread for thread in threading.enumerate() if thread.name == "start-up"]
        watcher.join(scaled(60))
        assert not watcher.is_alive()
    assert printed[0] == "start-up   0:00: preparing the data"


def test_a_short_start_up_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(startup_lines, "print_lines", printed.append)
    with startup_lines.startup_lines([("imports", 0.0)], first_s=scaled(600)):
        [watcher] = [thread for thread in threading.enumerate() if thread.name == "start-up"]
    watcher.join(scaled(60))
    assert not watcher.is_alive(), "it ends with the start-up, without waiting for its first line"
    assert printed == []
