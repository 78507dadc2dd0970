"""State of a training run, and the durations of its start-up."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ezpz_llm.base import UserError
from ezpz_llm.base.label_rows import align_rows
from ezpz_llm.checkpoint.saver import NotWrittenError, Saved, Saver
from ezpz_llm.data.samples import Batches, ValidationWindows
from ezpz_llm.data.shards import TokenData
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.engine.base import Engine
from ezpz_llm.evaluate.hellaswag import Item
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.model.compile import seconds_compiling
from ezpz_llm.observe import MetricsLog, StepTimeline, StepWatch, StepWork, Tracking, WallClock, terminal_width
from ezpz_llm.observe.throughput import format_duration
from ezpz_llm.rundir.records import Launch, Startup, read_record
from ezpz_llm.trainer.config import RunConfig
from ezpz_llm.trainer.early_end import EarlyEnd
from ezpz_llm.trainer.first_screen import expected_end
from ezpz_llm.trainer.memory_table import MemoryWatch
from ezpz_llm.trainer.plan import RunPlan
from ezpz_llm.trainer.position import Position
from ezpz_llm.trainer.selfcheck import SelfChecks
from ezpz_llm.trainer.spike_detector import SpikeDetector


@dataclass
class Session:
    """State of a run that has finished `step` optimizer steps and consumed the data up to `position`.

    `prompt` is None if the run generates no samples.
    """
    plan: RunPlan
    dist: Dist
    data: TokenData
    prompt: np.ndarray | None
    batches: Batches
    validation: ValidationWindows
    engine: Engine
    work: StepWork
    timeline: StepTimeline
    metrics: MetricsLog
    tracking: Tracking
    profiles: list[StepWatch]
    heartbeat: Heartbeat
    clock: WallClock
    early_end: EarlyEnd
    first_step: int
    """Number of finished steps when this process started: 0, or those of the loaded checkpoint."""
    step: int
    position: Position
    saver: Saver
    spikes: SpikeDetector
    checks: SelfChecks
    memory: MemoryWatch
    step_hash: int = 0
    """Hash of this rank's samples in the current step (see `Position`)."""
    saves: list[Saved] = field(default_factory=list)
    """Checkpoints that this run has written."""
    saved_step: int | None = None
    """Step of the checkpoint that was most recently written or rolled back to."""
    unsaved: NotWrittenError | None = None
    """Error that prevented writing the last checkpoint; None if it was written."""
    hellaswag: Sequence[Item] = ()
    """Items of `--hellaswag`; empty if the run does not score them."""
    verbose: bool = False
    """Print the start-up phases, self-checks and tables (`--verbose`)."""
    stopped: str | None = None
    """Reason for ending before the last step; None for a complete run."""
    failed: bool = False
    """True if `stopped` is a failure."""
    rollbacks: list[int] = field(default_factory=list)
    """Checkpoint step of each rollback, in order."""

    def observe(self, line: dict[str, Any]) -> None:
        """Pass a metrics line, before it is written, to the spike detector and the self-checks."""
        self.spikes.observe(line)
        self.checks.observe(line)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.plan.config


Marks = Sequence[tuple[str, float]]
"""Phases in order: name, and epoch time at which the phase ended."""


def durations(marks: Marks, process_started_at: float, launched_at: float | None) -> dict[str, float]:
    """Return the seconds of each phase of the start-up, in order, up to the last mark.

    Args:
        process_started_at: epoch time at which this process started.
        launched_at: epoch time at which launch started the ranks, by the clock of its node; None without launch.
            The time that launch spent before that is not included.
    """
    previous_end, seconds = process_started_at, {}
    if launched_at is not None:
        seconds["launching"] = process_started_at - launched_at
    for name, end in marks:
        seconds[name], previous_end = end - previous_end, end
    return seconds


def process_start_time() -> float:
    """Return the epoch time at which this process started, to 0.01 s on Linux and 1 s elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return psutil.Process().create_time()
    return time.time() - age


STEPS_TIMED = 3
"""Number of steps after the first that are timed to estimate the run's end time."""


def print_expected_end(session: Session) -> None:
    """Print the expected end time of the run, from the steps since the first. Call on rank 0."""
    session.metrics.erase_live_line()
    step_s = (session.clock.now() - session.clock.marks[-1][1]) / STEPS_TIMED
    left = session.config.steps - session.step
    print(expected_end(left, step_s, time.time(), terminal_width()), end="", flush=True)


def print_startup(session: Session) -> None:
    """Record the durations of the start-up in run.json, and print their sum; with --verbose, also each.

    Call on rank 0 after the first step.
    """
    session.clock.passed("first step")
    launched_at = None
    if RUN_ID_VARIABLE in os.environ:  # otherwise the record may be from an earlier launch
        with contextlib.suppress(UserError):  # an unreadable record
            launched_at = (read_record(session.dist.run_dir).launch or Launch()).started
    seconds = durations(session.clock.marks, process_start_time(), launched_at)
    if session.config.compile:
        seconds["compiling"] = seconds_compiling()
        seconds["first step"] -= seconds["compiling"]
    total = sum(seconds.values())
    session.dist.side.update_record(session.dist.run_dir, startup=Startup(seconds=seconds, total_s=total))
    if not session.verbose:
        text = f"the first step finished {format_duration(total)} after the ranks were started"
        print(align_rows([("start-up", text)], terminal_width()), end="", flush=True)
        return
    parts = ", ".join(f"{name} {duration_s:.1f}" for name, duration_s in seconds.items())
    print(f"start-up   {total:.1f} s to the end of the first step: {parts}", flush=True)
