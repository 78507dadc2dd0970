"""Profiles of a few steady steps: Python call tree (pyinstrument) and traces (torch.profiler)."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ezpz_llm.core.rundir import RunDir, SideFiles
from ezpz_llm.training.observe.profile_windows import Window

_PACKAGES = ("torch", "deepspeed", "ezpz_llm")
OTHER = "other"


class StepWatch(Protocol):
    """Observer of a run's steps, numbered from 0. `close` finishes the work if the run ends early."""

    def before_step(self, step: int) -> None:
        """Called before a step."""

    def after_step(self, step: int) -> None:
        """Called after a step."""

    def close(self) -> None:
        """Called when the run ends."""


_WEB_FONTS = re.compile(r"https://fonts\.googleapis\.com/[^\"'`)]*")
"""Font request in pyinstrument's page. Without the request, the page uses the browser's fonts and no network."""


class PythonProfile:
    """Python call tree of the window, sampled every millisecond, in `profile/host.html` and `profile/host.txt`.

    `profile/host.json` has the seconds by the package whose function ran or called C code: torch, deepspeed,
    ezpz_llm, or other.

    Overhead: 1.2 % in the profiled steps and 0.05 s in the run, for tiny-gpt2 with 0.06 s per step and one thread
    (benchmarks/profile_cost.py, results/profile_cost.json). A loop of pure Python calls can take several times as
    long, since each call is hooked. Other ranks are affected only when they wait for this rank.
    """

    def __init__(self, run_dir: RunDir, window: Window, side: SideFiles | None = None) -> None:
        self._run_dir = run_dir
        self._side = side or SideFiles()
        self._window = window
        self._profiler: Any = None
        self.path: Path | None = None
        """Path of the HTML page, once it is written."""

    def before_step(self, step: int) -> None:
        """Start at the window's first step."""
        if step == self._window.first:
            from pyinstrument import Profiler

            # async_mode is for coroutines, and costs time without them.
            self._profiler = Profiler(interval=0.001, async_mode="disabled")
            self._profiler.start()
            # The profiler must be stopped before interpreter shutdown, even if the run fails.
            atexit.register(self._stop)

    def _stop(self) -> None:
        if self._profiler is not None and self._profiler.is_running:
            self._profiler.stop()

    def after_step(self, step: int) -> None:
        """Stop and write after the window's last step."""
        if step == self._window.last:
            self.close()

    def close(self) -> None:
        """Write the profile if the profiler is running, such as in a run that ends early."""
        if self._profiler is None:
            return
        self._stop()
        atexit.unregister(self._stop)
        profiler, self._profiler = self._profiler, None
        self.path = self._run_dir.profile / "host.html"
        self._side.write(self.path.with_suffix(".txt"), profiler.output_text(unicode=True, color=False))
        self._side.write(self.path, _WEB_FONTS.sub("data:text/css,", profiler.output_html()))
        self._side.write_json(self.path.with_suffix(".json"),
                              _seconds_by_package(profiler.last_session.root_frame()))


def _seconds_by_package(root: Any) -> dict[str, float]:
    """Return the seconds of pyinstrument's call tree by the package of the innermost function that has a file."""
    seconds = dict.fromkeys((*_PACKAGES, OTHER), 0.0)
    frames = [(root, OTHER)]
    while frames:
        frame, package = frames.pop()
        inside = [child for child in frame.children if not child.is_synthetic]
        if frame.file_path and Path(frame.file_path).is_absolute():
            name = Path(frame.file_path_short).parts[0]  # relative to the entry of sys.path
            package = name if name in _PACKAGES else OTHER
        seconds[package] += frame.time - sum(child.time for child in inside)
        frames += [(child, package) for child in inside]
    return seconds


class TraceProfile:
    """torch.profiler trace of the window, one file per rank: `profile/trace-rankNNNN.json.gz`.

    The trace has a mark `step N` for each step (N from 1, as in metrics.jsonl), marks for the step's phases, and
    marks for the work between steps (log lines, evaluations, checkpoints). The result of `notes` is stored under
    "ezpz_llm". Open the trace in https://ui.perfetto.dev. Traced steps are slower. The profiler is initialized
    before the first traced step begins.
    """

    def __init__(self, run_dir: RunDir, rank: int, window: Window,
                 notes: Callable[[], dict[str, Any]] = dict, side: SideFiles | None = None) -> None:
        self._target = run_dir.trace(rank)
        self._side = side or SideFiles()
        self._window = window
        self._notes = notes
        self._profiler: torch.profiler.profile | None = None
        self.path: Path | None = None
        """Path of the trace, once it is written."""

    def before_step(self, step: int) -> None:
        """Start before the window's first step, and write the trace before the first step after the window."""
        if step == self._window.first:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif step > self._window.last:
            self.close()

    def after_step(self, step: int) -> None:
        """Do nothing, so that the work between steps is traced, too."""

    def close(self) -> None:
        """Write the trace if the profiler is running."""
        if self._profiler is None:
            return
        self._profiler.add_metadata_json("ezpz_llm", json.dumps(self._notes()))
        self._profiler.stop()
        profiler, self._profiler = self._profiler, None
        self._side.attempt(str(self._target), lambda: self._write(profiler))

    def _write(self, profiler: torch.profiler.profile) -> None:
        # Written under a temporary name, because `explain` may read the folder during the run.
        unfinished = self._target.with_name(f".{self._target.name}")
        profiler.export_chrome_trace(str(unfinished))
        self.path = unfinished.replace(self._target)
