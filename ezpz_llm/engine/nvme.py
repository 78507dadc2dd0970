"""Where a rank keeps what it offloads to files: a folder of its own, checked before DeepSpeed writes to it.

DeepSpeed's file operations do not look at what the system answers: a full disk would end in wrong numbers or in an
abort. So room is taken here first, and given back when all ranks have theirs.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import socket
import tempfile
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import nn

from ezpz_llm.base import UserError, system_text
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import together

_LOCK, _ROOM = "lock", "room"
_FILES = {"optimizer": 16, "param": 4}
"""Bytes a parameter of the rank's in files: weight, gradient and two moments in fp32; the parameter itself."""
_CAP_IPC_LOCK = 14
"""The number in <linux/capability.h> of the right to lock any amount of memory."""


def prepare(zero: dict[str, Any], named: str | None, model: nn.Module, dist: Dist, owner: Any) -> None:
    """Let the block "zero_optimization" name a new folder for this rank's files, removed when `owner` is gone.

    Collective.

    Args:
        named: the folder to make it in, which must be there on every node; None for one in the run directory.

    Raises:
        UserError: that folder is missing, not writable, full, or on a file system that libaio cannot use; or the
            process may not lock the memory of DeepSpeed's buffers, which would abort then. The same on every rank.
    """
    blocks = {name: zero[f"offload_{name}"] for name in ("optimizer", "param")
              if zero.get(f"offload_{name}", {}).get("device") == "nvme"}
    held = -(-sum(parameter.numel() for parameter in model.parameters()) // dist.mesh.size("dp", "sp"))
    base = dist.run_dir.offloaded if named is None else Path(named).expanduser().absolute()
    with ExitStack() as undo:
        def make() -> Path:
            """Make the folder of this rank, where there is room for what it will hold."""
            _check_locked_memory(_locked_bytes(blocks, zero, held))
            try:
                folder = _make_folder(base, dist.rank, named is None)
                ours = base if named is None else None
                undo.callback(weakref.finalize(owner, _remove, folder, _lock(folder), ours))
                _take_room(folder / _ROOM, sum(_FILES[name] for name in blocks) * held)
            except OSError as failure:
                raise UserError(f"offloaded state cannot be kept in {base}: {failure.strerror}",
                                where=f"rank {dist.rank} on {socket.gethostname()}", exit_code=1,
                                instead="--nvme-path DIR, a writable folder on each node's own disk") from failure
            return folder

        folder = together(dist, make)
        undo.pop_all()  # until `owner` is gone
    (folder / _ROOM).unlink()
    for block in blocks.values():
        block["nvme_path"] = str(folder)


def _locked_bytes(blocks: dict[str, dict[str, Any]], zero: dict[str, Any], held: int) -> int:
    """The page-locked buffers of the swappers for a rank that holds `held` elements, about."""
    elements = 0
    if optimizer := blocks.get("optimizer"):
        elements += optimizer.get("buffer_count", 4) * min(held, int(zero.get("sub_group_size", 1e9)))
    if param := blocks.get("param"):
        elements += param.get("buffer_count", 5) * int(param.get("buffer_size", 1e8))
    return 4 * elements


def _check_locked_memory(size: int) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size or _may_lock_all():
        return
    raise UserError(f"buffers for offload to files lock {size / 1e9:.2f} GB of memory; a process may lock "
                    f"{soft / 1e9:.3f} GB", where=socket.gethostname(),
                    instead="ulimit -l unlimited, or a smaller sub_group_size, buffer_count or buffer_size in a "
                            "ds_config of your own", exit_code=1)


def _make_folder(base: Path, rank: int, is_ours: bool) -> Path:
    if is_ours:
        base.mkdir(exist_ok=True)
    _sweep(base)
    return Path(tempfile.mkdtemp(prefix=f"{_prefix()}{rank:04d}-", dir=base))


def _take_room(path: Path, size: int) -> None:
    """Make a file in the way DeepSpeed does, past the system's cache, as large as all that it will write."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def _prefix() -> str:
    return f"ezpz-llm-{socket.gethostname()}-"


def _lock(folder: Path) -> int:
    """Mark a folder as in use for as long as this process lives. The descriptor that holds the mark."""
    hidden = folder / f"{_LOCK}.new"
    descriptor = os.open(hidden, os.O_CREAT | os.O_RDWR, 0o600)
    with suppress(OSError):  # a file system without locks: nobody can take the mark for a dead one's then
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(folder / _LOCK)
    return descriptor


def _sweep(base: Path) -> None:
    """Remove what killed processes of this host left."""
    for lock in base.glob(f"{_prefix()}*/{_LOCK}"):
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _remove(folder: Path, descriptor: int, parent: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    if parent is not None:
        with suppress(OSError):  # other ranks' folders are still in it
            parent.rmdir()


def _may_lock_all() -> bool:
    lines = system_text("/proc/self/status").splitlines()
    rights = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(rights >> _CAP_IPC_LOCK & 1)
