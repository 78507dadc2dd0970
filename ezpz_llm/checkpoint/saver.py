"""Save checkpoints, at once or in the background from a copy: the folder appears whole or not at all."""

from __future__ import annotations

import itertools
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from ezpz_llm.base import UserError
from ezpz_llm.checkpoint.manifest import complete, start_partial
from ezpz_llm.checkpoint.retention import Keep, prune
from ezpz_llm.checkpoint.writer import Shard, buffers_of, complete_folder, facts, read_shard, write_shard
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import broadcast, gather, together
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.device import synchronize
from ezpz_llm.engine.base import Engine
from ezpz_llm.layout.ds_defaults import uses_nvme
from ezpz_llm.rundir import RunDir

# A copy of a rank's part of the state in host memory, which can be written while training changes the state.
_ALIGN = 64


def host_bytes(shard: Shard) -> int:
    """Return the bytes of CPU memory that the copy of a shard takes."""
    return sum(map(_aligned, shard.outline.values()))


def _aligned(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGN) * _ALIGN


class HostMemory:
    """The memory for such copies: taken for the first, used again for the next, when the one before is written.

    For GPUs it is page-locked: copies run at the bus's full speed, all of them at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, shard: Shard) -> Shard:
        """The shard with its tensors as they are now; the engine may change its own when this returns."""
        needed = host_bytes(shard)
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=DEVICES[self._device.type].pins)
        offsets = itertools.accumulate(map(_aligned, shard.outline.values()), initial=0)
        copies = []
        for at, tensor in zip(offsets, shard.tensors, strict=False):
            size = tensor.numel() * tensor.element_size()
            place = self._memory[at:at + size].view(tensor.dtype)
            copies.append(place.copy_(tensor.detach().view(-1), non_blocking=True))
        synchronize(self._device)
        return replace(shard, tensors=iter(copies))


class NotWritten(UserError):
    """A checkpoint that could not be written; those before it stand."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step and folder, its bytes, the seconds from its step until it was complete."""

    step: int
    folder: Path
    size: int
    seconds: float


def save(engine: Engine, dist: Dist, run_dir: RunDir, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `state["step"]` and let `latest` name it. Collective.

    Args:
        state: what the caller needs to go on, in JSON's types; rank 0's is kept. The members optimizer_step,
            loss_scale, world_size, layout, degrees and versions are added.

    Returns:
        The checkpoint's folder.

    Raises:
        NotWritten: it could not be written (a full disk, say). Nothing of it is left, and those that there were
            before are as they were. The same on every rank.
    """
    saver = Saver(dist, run_dir, None, in_background=False)
    saver.start(engine, state)
    return saver.finish().folder  # type: ignore[union-attr]  # what was begun is complete, or raises


def start_task(action: Callable[[], Any], in_background: bool) -> Future[Any]:
    """Run an action, in a daemon thread or at once; the future has its result, or what it raised."""
    future: Future[Any] = Future()

    def run() -> None:
        """The action, with its outcome in the future."""
        try:
            future.set_result(action())
        except BaseException as error:  # raised again where the outcome is asked for
            future.set_exception(error)

    if in_background:
        threading.Thread(target=run, daemon=True).start()
    else:
        run()
    return future


@dataclass
class _Save:
    """A checkpoint on its way. `is_last_part`: all ranks have written, and rank 0 completes the folder."""

    partial: Path
    record: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    began: float
    task: Future[Any]
    is_last_part: bool = False


class Saver:
    """Writes the checkpoints of one run, one at a time.

    In the background a save is: every rank copies its part to host memory, and goes on training while a thread of
    its own writes the copy; when all have, the ranks tell rank 0 what they wrote, and its thread completes the
    folder; then all learn the outcome. Only the main threads communicate, in `start`, `advance` and `finish`, which
    all ranks enter at the same step.

    Args:
        keep: what to remove after a successful save; None for nothing.
        in_background: where there is host memory for the copies, and the state is in memory at all.
    """

    def __init__(self, dist: Dist, run_dir: RunDir, keep: Keep | None, in_background: bool) -> None:
        self._dist, self._run_dir, self._keep = dist, run_dir, keep
        self.in_background = in_background
        """True if a save that was started may still be in progress; `start` finds out where that is impossible."""
        self._memory: HostMemory | None = None
        self._save: _Save | None = None

    @property
    def is_busy(self) -> bool:
        """True if this rank is still writing."""
        return self._save is not None and not self._save.task.done()

    def start(self, engine: Engine, state: dict[str, Any], *, at_once: bool = False) -> str | None:
        """Begin to save the present state; `save` says what is in it. An earlier save is waited for. Collective.

        Args:
            at_once: write before returning. `finish` is still to be called.

        Returns:
            Why this run's checkpoints are not written in the background after all, once that is found.

        Raises:
            NotWritten: the earlier checkpoint could not be written, or this one not begun.
        """
        self.finish()
        step, began = state["step"], time.monotonic()
        training = engine.training_state()
        folders = self._together(step, lambda: start_partial(self._run_dir.checkpoints, step), on_main=True)
        partial = broadcast(self._dist, folders)
        record = {**state, **facts(engine, self._dist, training)}
        buffers = buffers_of(engine.module) if self._dist.is_main else {}
        shard = read_shard(training, self._dist.rank, engine.device, buffers)
        note = None
        in_background = self.in_background and not at_once
        if in_background and self._memory is None:
            note = self._why_not(engine, shard)
            in_background = self.in_background = note is None
        if in_background:
            self._memory = self._memory or HostMemory(engine.device)
            shard = self._memory.copy(shard)
        task = start_task(lambda: write_shard(partial, shard), in_background)
        self._save = _Save(partial, record, training.shapes, training.kinds, began, task)
        return note

    def advance(self) -> Saved | None:
        """Go on with a save that no rank is busy with. Collective.

        Returns:
            The checkpoint, when it is complete; None before that, and where there is nothing to do.

        Raises:
            NotWritten: it could not be written, on some rank. Nothing of it is left. The same on every rank.
        """
        save = self._save
        if save is None:
            return None
        try:
            result = self._together(save.record["step"], save.task.result)
            if not save.is_last_part:
                written = gather(self._dist, result) or []
                save.task = start_task(lambda: self._complete(save, written), self.in_background)
                save.is_last_part = True
                return None
        except NotWritten:
            self._save = None
            if self._dist.is_main:
                shutil.rmtree(save.partial, ignore_errors=True)
            raise
        self._save = None
        folder, size = broadcast(self._dist, result)
        return Saved(save.record["step"], folder, size, time.monotonic() - save.began)

    def finish(self) -> Saved | None:
        """Wait until the save in progress, if there is one, is complete. Collective. Raises what `advance` does."""
        saved = None
        while self._save is not None:
            saved = self.advance()
        return saved

    def _complete(self, save: _Save, written: list[Any]) -> tuple[Path, int] | None:
        if not self._dist.is_main:
            return None
        folder = complete_folder(save.partial, save.shapes, save.kinds, written, save.record)
        if self._keep is not None:
            prune(self._run_dir, self._keep)
        return folder, sum(file.size for file, _ in written)

    def _together(self, step: int, action: Callable[[], Any], on_main: bool = False) -> Any:
        """Run `action` on every rank or on rank 0 only; an OSError on any rank becomes NotWritten on all."""
        def attempt() -> Any:
            """Run `action`; an OSError becomes NotWritten, with the last complete checkpoint."""
            try:
                return action()
            except OSError as failure:
                before = complete(self._run_dir.checkpoints)
                stands = f"; {before[-1].name} stands" if before else ""
                raise NotWritten(
                    f"the checkpoint of step {step} could not be written: {failure.strerror}{stands}",
                    where=f"rank {self._dist.rank}, {failure.filename or self._run_dir.checkpoints}",
                    instead="make room there, or name another place with --run-dir DIR", exit_code=1) from failure

        return together(self._dist, attempt, on_main=on_main)

    def _why_not(self, engine: Engine, shard: Shard) -> str | None:
        """Why copies in host memory are not to be had: the same answer on every rank. Collective."""
        if uses_nvme(engine.layout):
            return "the optimizer's state is in files, and not copied to memory"
        needs = gather(self._dist, (socket.gethostname(), host_bytes(shard), psutil.virtual_memory().available))
        by_host: dict[str, tuple[int, int]] = {}
        for host, size, available in needs or []:
            by_host[host] = (by_host.get(host, (0, 0))[0] + size, available)
        return broadcast(self._dist, next(
            (f"copies of the state would take {size / 1e9:.3g} GB of {host}'s memory, of which "
             f"{available / 1e9:.3g} GB are free"
             for host, (size, available) in by_host.items() if size > _SHARE * available), None))


_SHARE = 0.8
"""Share of a node's free memory that copies may take."""
