"""Durations of the start-up, from `launch` to the end of the first step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.model.compile import seconds_compiling
from ezpz_llm.rundir import read_record
from ezpz_llm.trainer.session import Session

Marks = Sequence[tuple[str, float]]
"""What has just ended, and the epoch time."""


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
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return psutil.Process().create_time()
    return time.time() - age


def print_startup(session: Session) -> None:
    """Print the durations of the start-up after the first step, and put them into run.json (rank 0)."""
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
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items())
    print(f"start-up   {total:.1f} s to the end of the first step: {parts}", flush=True)
