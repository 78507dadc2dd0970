"""Saving of checkpoints, synchronously or in the background from a copy; a folder appears only when complete."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.memory_groups import usable_memory
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint.chain import continue_branch, place
from ezpz_llm.training.checkpoint.cpu_copy import CpuMemory, cpu_bytes
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints, start_partial
from ezpz_llm.training.checkpoint.retention import Keep, prune
from ezpz_llm.training.checkpoint.state import Progress, State
from ezpz_llm.training.checkpoint.writer import (
    Shard,
    Trained,
    buffers_of,
    complete_folder,
    make_state,
    read_shard,
    write_shard,
)
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import broadcast, gather, run_together
from ezpz_llm.training.layout.ds_defaults import uses_nvme


class NotWrittenError(UserError):
    """Error for a checkpoint that could not be written; earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Saved:
    """Complete checkpoint: step, folder, size in bytes, and seconds from the start of the save to completion."""

    step: int
    folder: Path
    size: int
    seconds: float


def save(engine: Trained, dist: Dist, run_dir: RunDir, progress: Progress) -> Path:
    """Write the checkpoint of `progress.step` synchronously. Collective.

    Args:
        progress: values that the caller needs to resume; rank 0's are saved. `save` adds the members of `State`.

    Returns:
        The checkpoint's folder.

    Raises:
        NotWrittenError: it could not be written, for example because the disk is full. Its files are removed, and
            earlier checkpoints are unchanged. The error is the same on every rank.
    """
    saver = Saver(dist, run_dir, None, in_background=False)
    saver.start(engine, progress)
    return saver.finish().folder  # type: ignore[union-attr]  # a started save completes or raises


def _start_task(action: Callable[[], Any], in_background: bool) -> Future[Any]:
    """Run an action, in a daemon thread or before returning; the future holds its result or exception."""
    future: Future[Any] = Future()

    def run() -> None:
        """Run the action and store its result or exception in the future."""
        try:
            future.set_result(action())
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    if in_background:
        threading.Thread(target=run, daemon=True).start()
    else:
        run()
    return future


@dataclass
class _Save:
    """Save in progress. `is_completing`: all ranks have written their files, and rank 0 completes the folder."""

    partial: Path
    state: State
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, tuple[str, ...]]
    began: float
    task: Future[Any]
    is_completing: bool = False


class Saver:
    """Writer of a run's checkpoints, one at a time.

    A save in the background has these stages:

    1. Each rank copies its shard to CPU memory and continues training. A thread writes the copy.
    2. When all ranks have written, they send rank 0 the records of their files. A thread of rank 0 completes the
       folder.
    3. Rank 0 broadcasts the result.

    Only the main threads communicate, in `start`, `advance` and `finish`, which all ranks call after the same step.

    Args:
        keep: retention rule to apply after a successful save; None to keep all.
        in_background: save in the background if CPU memory suffices for the copies and the optimizer state is in
            memory.
    """

    def __init__(self, dist: Dist, run_dir: RunDir, keep: Keep | None, in_background: bool) -> None:
        self._dist, self._run_dir, self._keep = dist, run_dir, keep
        self.in_background = in_background
        """True if saves run in the background; `start` sets it to False if that is impossible."""
        self._memory: CpuMemory | None = None
        self._save: _Save | None = None

    @property
    def is_busy(self) -> bool:
        """True if this rank is still writing."""
        return self._save is not None and not self._save.task.done()

    def start(self, engine: Trained, progress: Progress, *, at_once: bool = False) -> str | None:
        """Start saving the current state (see `save`); finish an earlier save first. Collective.

        Args:
            at_once: write this rank's file before returning; `finish` must still be called.

        Returns:
            At the first background save, the reason why this run cannot save in the background, if any.

        Raises:
            NotWrittenError: the earlier checkpoint could not be written, or this one could not be started.
        """
        self.finish()
        step, began = progress.step, time.monotonic()
        training = engine.training_state()
        folders = self._run_together(step, lambda: start_partial(self._run_dir.checkpoints, step), on_main=True)
        partial = broadcast(self._dist, folders)
        state = make_state(progress, engine, self._dist, training)
        buffers = buffers_of(engine.module) if self._dist.is_main else {}
        shard = read_shard(training, self._dist.rank, engine.device, buffers)
        note = None
        in_background = self.in_background and not at_once
        if in_background and self._memory is None:
            note = self._background_blocker(engine, shard)
            in_background = self.in_background = note is None
        if in_background:
            self._memory = self._memory or CpuMemory(engine.device)
            shard = self._memory.copy(shard)
        task = _start_task(lambda: write_shard(partial, shard), in_background)
        self._save = _Save(partial, state, training.shapes, training.kinds, began, task)
        return note

    def advance(self) -> Saved | None:
        """Run the next stage of the save in progress; wait for ranks that are still writing. Collective.

        Returns:
            The checkpoint once it is complete; None before that, or if there is no save in progress.

        Raises:
            NotWrittenError: a rank could not write. The checkpoint's files are removed. Every rank raises it.
        """
        save = self._save
        if save is None:
            return None
        try:
            result = self._run_together(save.state.step, save.task.result)
            if not save.is_completing:
                written = gather(self._dist, result) or []
                save.task = _start_task(lambda: self._complete(save, written), self.in_background)
                save.is_completing = True
                return None
        except NotWrittenError:
            self._save = None
            if self._dist.is_main:
                shutil.rmtree(save.partial, ignore_errors=True)
            raise
        self._save = None
        folder, size = broadcast(self._dist, result)
        return Saved(save.state.step, folder, size, time.monotonic() - save.began)

    def finish(self) -> Saved | None:
        """Complete the save in progress, if any. Collective. Raises the errors of `advance`."""
        saved = None
        while self._save is not None:
            saved = self.advance()
        return saved

    def _complete(self, save: _Save, written: list[Any]) -> tuple[Path, int] | None:
        if not self._dist.is_main:
            return None
        checkpoints = self._run_dir.checkpoints
        state = place(self._dist, checkpoints, save.state)
        folder = complete_folder(save.partial, save.shapes, save.kinds, written, state)
        continue_branch(self._dist, checkpoints, state)
        if self._keep is not None:
            prune(self._run_dir, self._keep)
        return folder, sum(file.size for file, _ in written)

    def _run_together(self, step: int, action: Callable[[], Any], on_main: bool = False) -> Any:
        """Run `action` on every rank or on rank 0 only; an OSError on any rank becomes NotWrittenError on all."""
        def attempt() -> Any:
            """Run `action`; turn an OSError into NotWrittenError, naming the last complete checkpoint."""
            try:
                return action()
            except OSError as failure:
                earlier = complete_checkpoints(self._run_dir.checkpoints)
                intact = f"; {earlier[-1].name} is intact" if earlier else ""
                raise NotWrittenError(
                    f"the checkpoint of step {step} could not be written: {failure.strerror}{intact}",
                    where=f"rank {self._dist.rank}, {failure.filename or self._run_dir.checkpoints}",
                    instead="free disk space there, or pass another --run-dir DIR", exit_code=1) from failure

        return run_together(self._dist, attempt, on_main=on_main)

    def _background_blocker(self, engine: Trained, shard: Shard) -> str | None:
        """Return the reason why the state cannot be copied to CPU memory, or None. Collective.

        The result is the same on every rank.
        """
        if uses_nvme(engine.layout):
            return "the optimizer state is in files, not in memory"
        demands = gather(self._dist, (socket.gethostname(), cpu_bytes(shard, engine.device), usable_memory()[1]))
        by_node: dict[str, tuple[int, int]] = {}
        for hostname, size, available in demands or []:
            by_node[hostname] = (by_node.get(hostname, (0, 0))[0] + size, available)
        return broadcast(self._dist, next(
            (f"copies of the state need {size / 1e9:.3g} GB of memory on {hostname}, where "
             f"{available / 1e9:.3g} GB are free"
             for hostname, (size, available) in by_node.items() if size > _MAX_MEMORY_SHARE * available), None))


_MAX_MEMORY_SHARE = 0.8
"""Maximum share of a node's free memory for copies."""
