"""Durations of a run's start-up, and its expected end, on the console and in run.json."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.rundir.records import CompiledGraphs, Launch, Startup, read_record
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.training.model.compile import seconds_compiling
from ezpz_llm.training.model.shared_compilation import SharedCompiler
from ezpz_llm.training.observe import WallClock, terminal_width
from ezpz_llm.training.observe.throughput import format_duration
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.first_screen import expected_end
from ezpz_llm.training.trainer.plan import RunPlan

_STEPS_TIMED = 3
"""Number of steps after the first that are timed to estimate the run's end time."""


class StartupReport(Callback):
    """Report of the start-up after the first step, and of the expected end a few steps later, on rank 0."""

    def __init__(self, plan: RunPlan, clock: WallClock, compiler: SharedCompiler | None) -> None:
        self._plan, self._clock, self._compiler = plan, clock, compiler
        self._steps = 0

    def on_step_end(self, context: CallbackContext) -> None:
        """Count the steps, and report after the first and after the timed ones."""
        self._steps += 1
        if self._steps > 1 + _STEPS_TIMED or not context.dist.is_main:
            return
        if self._steps == 1:
            self._report_startup(context)
        elif self._steps == 1 + _STEPS_TIMED:
            step_s = (self._clock.now() - self._clock.marks[-1][1]) / _STEPS_TIMED
            left = context.total_steps - context.step
            context.print(expected_end(left, step_s, time.time(), terminal_width()).removesuffix("\n"))

    def _report_startup(self, context: CallbackContext) -> None:
        """Record the durations in run.json, and print their sum; with --verbose, also each."""
        self._clock.passed("first step")
        launched_at = None
        if RUN_ID_VARIABLE in os.environ:  # otherwise the record may be from an earlier launch
            with contextlib.suppress(UserError):  # an unreadable record
                launched_at = (read_record(context.dist.run_dir).launch or Launch()).started
        seconds = durations(self._clock.marks, _process_start_time(), launched_at)
        graphs = None
        if self._compiler is not None:
            seconds["compiling"] = seconds_compiling()
            seconds["first step"] -= seconds["compiling"]
            graphs = CompiledGraphs(*self._compiler.counts())
        total = sum(seconds.values())
        context.dist.side.update_record(context.dist.run_dir,
                                        startup=Startup(seconds=seconds, total_s=total, graphs=graphs))
        if not self._plan.verbose:
            text = f"the first step finished {format_duration(total)} after the ranks were started"
            context.print(align_rows([("start-up", text)], terminal_width()).removesuffix("\n"))
            return
        # run.json keeps the older name of this phase.
        parts = ", ".join(f"{'rendezvous' if name == 'meeting' else name} {duration_s:.1f}"
                          for name, duration_s in seconds.items())
        context.print(f"start-up   {total:.1f} s to the end of the first step: {parts}")
        if graphs is not None:
            context.print(f"compiled   {graphs.compiled} graphs, {graphs.loaded} loaded (from other ranks or "
                          "earlier runs)")


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


def _process_start_time() -> float:
    """Return the epoch time at which this process started, to 0.01 s on Linux and 1 s elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return psutil.Process().create_time()
    return time.time() - age
