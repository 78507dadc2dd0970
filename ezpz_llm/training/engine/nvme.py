"""Folder for the files that a rank offloads, checked before DeepSpeed writes to it.

DeepSpeed's file operations ignore system errors, so a full disk would cause wrong results or an abort. Therefore
each rank first allocates the space it needs, and frees it when all ranks have succeeded.
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

from ezpz_llm.core.base import UserError, system_text
from ezpz_llm.training.dist import Dist, deepspeed_patches
from ezpz_llm.training.dist.agreement import run_together
from ezpz_llm.training.layout.layout import Layout

_LOCK, _SPACE = "lock", "room"
_FILES = {"optimizer": 16, "param": 4}
"""Bytes in files per parameter of the rank: weight, gradient and two moments in fp32; the parameter itself."""
_CAP_IPC_LOCK = 14
"""Capability to lock any amount of memory, from <linux/capability.h>."""


def prepare(zero: dict[str, Any], named: str | None, model: nn.Module, dist: Dist, owner: Any) -> None:
    """Create a folder for this rank's files and enter it in the block "zero_optimization". Collective.

    The folder is removed when `owner` is garbage-collected.

    Args:
        named: parent folder, which must exist on every node; None for a folder in the run directory.

    Raises:
        UserError: the parent folder is missing, not writable, full, or on a file system that libaio cannot use; or
            the process may not lock the memory of DeepSpeed's buffers, which would make DeepSpeed abort. Raised on
            every rank.
    """
    blocks = {name: zero[f"offload_{name}"] for name in ("optimizer", "param")
              if zero.get(f"offload_{name}", {}).get("device") == "nvme"}
    elements = -(-sum(parameter.numel() for parameter in model.parameters()) // dist.mesh.size("dp", "sp"))
    base = dist.run_dir.offloaded if named is None else Path(named).expanduser().absolute()
    with ExitStack() as undo:
        def make() -> Path:
            """Create the folder of this rank, and check the space for its files."""
            _check_locked_memory(_locked_bytes(blocks, zero, elements))
            try:
                folder = _make_folder(base, dist.rank, named is None)
                parent = base if named is None else None
                undo.callback(weakref.finalize(owner, _remove, folder, _lock(folder), parent))
                _allocate(folder / _SPACE, sum(_FILES[name] for name in blocks) * elements)
            except OSError as error:
                raise UserError(f"cannot offload state to {base}: {error.strerror}",
                                where=f"rank {dist.rank} on {socket.gethostname()}", exit_code=1,
                                instead="pass a writable folder on each node's disk: --nvme-path DIR") from error
            return folder

        folder = run_together(dist, make)
        undo.pop_all()  # the finalizer of `owner` remains
    (folder / _SPACE).unlink()
    for block in blocks.values():
        block["nvme_path"] = str(folder)


def keep_unaligned_gradients(zero: Any, layout: Layout) -> None:
    """Keep gradients in memory that DeepSpeed cannot read back from files, if the layout's optimizer is in files.

    Raises:
        UserError: DeepSpeed has no `optimizer_swapper`, so the optimizer would step with stale gradients.
    """
    if layout.zero.offload_optimizer == "nvme":
        deepspeed_patches.keep_unaligned_gradients(zero)


def _locked_bytes(blocks: dict[str, dict[str, Any]], zero: dict[str, Any], elements: int) -> int:
    """Estimate the page-locked buffers of the swappers, for a rank that holds `elements` elements."""
    buffered = 0
    if optimizer := blocks.get("optimizer"):
        buffered += optimizer.get("buffer_count", 4) * min(elements, int(zero.get("sub_group_size", 1e9)))
    if param := blocks.get("param"):
        buffered += param.get("buffer_count", 5) * int(param.get("buffer_size", 1e8))
    return 4 * buffered


def _check_locked_memory(size: int) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size or _may_lock_all():
        return
    raise UserError(f"buffers for offload to files lock {size / 1e9:.2f} GB of memory, but a process may lock only "
                    f"{soft / 1e9:.3f} GB", where=socket.gethostname(),
                    instead="set ulimit -l unlimited, or use your own ds_config with a smaller sub_group_size, "
                            "buffer_count or buffer_size", exit_code=1)


def _make_folder(base: Path, rank: int, in_run_dir: bool) -> Path:
    if in_run_dir:
        base.mkdir(exist_ok=True)
    _remove_stale_folders(base)
    return Path(tempfile.mkdtemp(prefix=f"{_prefix()}{rank:04d}-", dir=base))


def _allocate(path: Path, size: int) -> None:
    """Create a file with O_DIRECT, as DeepSpeed does, of the total size that DeepSpeed will write."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def _prefix() -> str:
    return f"ezpz-llm-{socket.gethostname()}-"


def _lock(folder: Path) -> int:
    """Lock a folder for the lifetime of this process, and return the descriptor of its lock file."""
    hidden = folder / f"{_LOCK}.new"
    descriptor = os.open(hidden, os.O_CREAT | os.O_RDWR, 0o600)
    # If this file system has no locks, `_remove_stale_folders` finds no lock file and keeps the folder.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(folder / _LOCK)
    return descriptor


def _remove_stale_folders(base: Path) -> None:
    """Remove folders that killed processes on this node left behind."""
    for lock in base.glob(f"{_prefix()}*/{_LOCK}"):
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _remove(folder: Path, descriptor: int, parent: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    if parent is not None:
        with suppress(OSError):  # not empty while it contains other ranks' folders
            parent.rmdir()


def _may_lock_all() -> bool:
    lines = system_text("/proc/self/status").splitlines()
    capabilities = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(capabilities >> _CAP_IPC_LOCK & 1)
