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
from ezpz_llm.base.rows import aligned
from ezpz_llm.checkpoint.saver import NotWritten, Saved, Saver
from ezpz_llm.data.samples import Batches, ValidationWindows
from ezpz_llm.data.shards import TokenData
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.engine.base import Engine
from ezpz_llm.evaluate.hellaswag import Item
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.model.compile import seconds_compiling
from ezpz_llm.observe import MetricsLog, StepTimeline, StepWatch, StepWork, Tracking, WallClock, terminal_width
from ezpz_llm.observe.throughput import duration
from ezpz_llm.rundir import read_record
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
    """A run in progress. `step` counts finished optimizer steps, `position` the data they consumed.

    `prompt` is what samples start from, None where there are none.
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
    step: int
    position: Position
    saver: Saver
    spikes: SpikeDetector
    checks: SelfChecks
    memory: MemoryWatch
    taken: int = 0
    """The hash of the samples that this rank answers for in the step in progress (see `Position`)."""
    saves: list[Saved] = field(default_factory=list)
    """The checkpoints that this run has completed."""
    saved_step: int | None = None
    """The step of the last checkpoint that this run has completed, or gone back to."""
    unsaved: NotWritten | None = None
    """Why the last checkpoint is not there; None where it is."""
    hellaswag: Sequence[Item] = ()
    """Items that `--hellaswag` names; empty if nothing is scored."""
    verbose: bool = False
    """Print start-up, self-checks and tables, too (`--verbose`)."""
    stopped: str | None = None
    """Why the run ended before its last step; None if it did not."""
    failed: bool = False
    """True if that is a failure."""
    rollbacks: list[int] = field(default_factory=list)
    """The step of the checkpoint of each rollback, in order."""

    def observe(self, line: dict[str, Any]) -> None:
        """Pass a metrics line, before it is written, to the spike detector and the self-checks."""
        self.spikes.observe(line)
        self.checks.observe(line)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.plan.config


# Durations of the start-up, from `launch` to the end of the first step.
Marks = Sequence[tuple[str, float]]
"""The phase that has just ended, and the epoch time."""


def durations(marks: Marks, process: float, launched: float | None) -> dict[str, float]:
    """Return the seconds of each part of the start-up, in order, from the first known moment to the last mark.

    Args:
        process: epoch time at which this process began.
        launched: at which launch had its plan, by its own host's clock; None without launch. What it did before is
            not counted.
    """
    before, found = process, {}
    if launched is not None:
        found["launching"] = process - launched
    for name, moment in marks:
        found[name], before = moment - before, moment
    return found


def process_began() -> float:
    """The epoch time at which this process began, to a hundredth of a second on Linux and to a second elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return psutil.Process().create_time()
    return time.time() - age


STEPS_TIMED = 3
"""Steps after the first by which the end of the run is estimated."""


def print_expected_end(session: Session) -> None:
    """Say when the run may end, by the steps since the first one (rank 0)."""
    session.metrics.erase_live_line()
    step_s = (session.clock.now() - session.clock.marks[-1][1]) / STEPS_TIMED
    left = session.config.steps - session.step
    print(expected_end(left, step_s, time.time(), terminal_width()), end="", flush=True)


def print_startup(session: Session) -> None:
    """Put the durations of the start-up into run.json after the first step, and print them (rank 0)."""
    session.clock.passed("first step")
    launched = None
    if RUN_ID_VARIABLE in os.environ:  # else the record may be of an earlier launch into the same run directory
        with contextlib.suppress(UserError):  # a record that cannot be read
            record: dict[str, Any] = read_record(session.dist.run_dir).get("launch", {})
            launched = record.get("started")
    found = durations(session.clock.marks, process_began(), launched)
    if session.config.compile:
        found["compiling"] = seconds_compiling()
        found["first step"] -= found["compiling"]
    total = sum(found.values())
    session.dist.side.update_record(session.dist.run_dir, startup={"seconds": found, "total_s": total})
    if not session.verbose:
        print(aligned([("started", f"the first step ended after {duration(total)}")], terminal_width()), end="",
              flush=True)
        return
    # run.json has kept an older name of one of them.
    parts = ", ".join(f"{'rendezvous' if name == 'meeting' else name} {seconds:.1f}"
                      for name, seconds in found.items())
    print(f"start-up   {total:.1f} s to the end of the first step: {parts}", flush=True)
