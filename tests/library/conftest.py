"""Fixtures of the library's tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from still_clock import StillClock

import ezpz_llm
from ezpz_llm.training.library import run as library_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ezpz_llm.Run]:
    """Set up a run in this process, and end it without plots and reports, if the test has not."""
    run = ezpz_llm.setup(device="cpu", run_dir=tmp_path / "run", log_every=4)
    yield run
    if library_run.is_current(run):
        library_run._forget()
        run.dist.close()


@pytest.fixture
def clock(run: ezpz_llm.Run, monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Replace the clock of the run."""
    clock = StillClock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run.clock.started = 0.0
    run.clock.spans.clear()
    run.begin_step()
    return clock
