"""Profiles of a few steady steps: the host's call tree (pyinstrument), traces (torch.profiler)."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ezpz_llm.rundir import RunDir, SideFiles

SKIP_STEPS = 5
"""Steps before a profile starts: the first ones build caches, optimizer state and kernels."""
PROFILE_STEPS = 20
_PACKAGES = ("torch", "deepspeed", "ezpz_llm")
OTHER = "other"


@dataclass(frozen=True)
class Window:
    """Steps `first` to `first + steps - 1` (counted from 0, like the training loop) are profiled."""

    first: int
    steps: int

    @property
    def last(self) -> int:
        """The last profiled step."""
        return self.first + self.steps - 1


class StepWatch(Protocol):
    """Looks at some of a run's steps, counted from 0; `close` ends what an early end of the run leaves open."""

    def before_step(self, step: int) -> None:
        """Called before a step."""

    def after_step(self, step: int) -> None:
        """Called after a step."""

    def close(self) -> None:
        """Called when the run ends."""


def profile_window(first_step: int, total_steps: int, steps: int = PROFILE_STEPS,
                   skip: int = SKIP_STEPS) -> Window | None:
    """`steps` steps after `skip`, fewer of both in a short run; None where there is no step left to run."""
    left = total_steps - first_step
    if left < 1:
        return None
    skip = min(skip, left // 2)
    return Window(first_step + skip, min(steps, left - skip))


_WEB_FONTS = re.compile(r"https://fonts\.googleapis\.com/[^\"'`)]*")
"""Font request in pyinstrument's page. Without it, the page uses the browser's fonts and needs no network."""


class HostProfile:
    """The host's call tree over the window, sampled each millisecond: `profile/host.html` and `profile/host.txt`.

    `profile/host.json` has its seconds by the package whose function ran, or called into C: torch, deepspeed,
    ezpz_llm or other.
    Other ranks feel it only by waiting for this one. Measured on tiny-gpt2 (0.06 s a step, one thread) the profiled
    steps took 1.2 % longer and the whole run 0.05 s (benchmarks/profile_cost.py, results/profile_cost.json); a loop
    of pure Python calls can take several times as long, since each call is hooked.
    """

    def __init__(self, run_dir: RunDir, window: Window, side: SideFiles | None = None) -> None:
        self._run_dir = run_dir
        self._side = side or SideFiles()
        self._window = window
        self._profiler: Any = None
        self.path: Path | None = None
        """The written page, once the window has passed."""

    def before_step(self, step: int) -> None:
        """Start at the window's first step."""
        if step == self._window.first:
            from pyinstrument import Profiler

            # async_mode is for coroutines; without them it only costs.
            self._profiler = Profiler(interval=0.001, async_mode="disabled")
            self._profiler.start()
            # It must not be called any more when the interpreter comes apart, however the run ends.
            atexit.register(self._stop)

    def _stop(self) -> None:
        if self._profiler is not None and self._profiler.is_running:
            self._profiler.stop()

    def after_step(self, step: int) -> None:
        """Stop and write after the window's last step."""
        if step == self._window.last:
            self.close()

    def close(self) -> None:
        """Write what there is, if the window was entered and not yet closed (a run that ends early)."""
        if self._profiler is None:
            return
        self._stop()
        atexit.unregister(self._stop)
        profiler, self._profiler = self._profiler, None
        self.path = self._run_dir.profile / "host.html"
        self._side.write(self.path.with_suffix(".txt"), profiler.output_text(unicode=True, color=False))
        self._side.write(self.path, _WEB_FONTS.sub("data:text/css,", profiler.output_html()))
        self._side.write_json(self.path.with_suffix(".json"),
                              seconds_by_package(profiler.last_session.root_frame()))


def seconds_by_package(root: Any) -> dict[str, float]:
    """The seconds of pyinstrument's call tree by the package of the innermost function that is in a file."""
    found = dict.fromkeys((*_PACKAGES, OTHER), 0.0)
    frames = [(root, OTHER)]
    while frames:
        frame, package = frames.pop()
        inside = [child for child in frame.children if not child.is_synthetic]
        if frame.file_path and Path(frame.file_path).is_absolute():
            name = Path(frame.file_path_short).parts[0]  # from the entry of sys.path on
            package = name if name in _PACKAGES else OTHER
        found[package] += frame.time - sum(child.time for child in inside)
        frames += [(child, package) for child in inside]
    return found


class TraceProfile:
    """A torch.profiler trace of the window's operators and kernels: `profile/trace-rankNNNN.json.gz`, one a rank.

    It holds the steps of the window, each marked `step N` (N from 1, as in metrics.jsonl) and with its phases, and
    what comes after each of them before the next (log lines, evaluations, checkpoints), each marked with its name.
    What `notes` returns is part of it, under "ezpz_llm". Opens in https://ui.perfetto.dev. Steps are slower while
    they are traced; the profiler sets itself up before the first of them begins.
    """

    def __init__(self, run_dir: RunDir, rank: int, window: Window,
                 notes: Callable[[], dict[str, Any]] = dict, side: SideFiles | None = None) -> None:
        self._target = run_dir.trace(rank)
        self._side = side or SideFiles()
        self._window = window
        self._notes = notes
        self._profiler: torch.profiler.profile | None = None
        self.path: Path | None = None
        """The written trace, once the window has passed."""

    def before_step(self, step: int) -> None:
        """Start at the window's first step, stop and write before the first one after it."""
        if step == self._window.first:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif step > self._window.last:
            self.close()

    def after_step(self, step: int) -> None:
        """Attribute what comes after a step to it."""

    def close(self) -> None:
        """Write what there is, if the window was entered and not yet closed."""
        if self._profiler is None:
            return
        self._profiler.add_metadata_json("ezpz_llm", json.dumps(self._notes()))
        self._profiler.stop()
        profiler, self._profiler = self._profiler, None
        self._side.attempt(str(self._target), lambda: self._write(profiler))

    def _write(self, profiler: torch.profiler.profile) -> None:
        # Under another name until it is whole: `explain` may look while the run goes on.
        unfinished = self._target.with_name(f".{self._target.name}")
        profiler.export_chrome_trace(str(unfinished))
        self.path = unfinished.replace(self._target)
