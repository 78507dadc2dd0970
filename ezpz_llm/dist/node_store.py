"""The store of ranks that all run on one node: a file in the run's private folder there, so that nothing listens.

torch's own network store takes commands from whoever connects to it, and on the loopback that is every user of the
node. To this one only the kernel's file permissions lead.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

from torch.distributed import FileStore, Store

from ezpz_llm.base.private import PrivateFolder, open_private
from ezpz_llm.base.secret import run_secret
from ezpz_llm.errors import UserError
from ezpz_llm.launch.addresses import is_loopback
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.variables import NODE_DIR_VARIABLE

_LOCK_WITHIN_S = 2.0
"""The others hold the lock only for a look at it."""
_LONGEST_PAUSE_S = 0.1


def node_folder(address: str, env: Mapping[str, str]) -> PrivateFolder | None:
    """The run's private folder on this node, where launch placed all ranks on one and its shims made the folder;
    None elsewhere, and in containers that do not share the node's memory."""
    if run_secret(env) is None or NODE_DIR_VARIABLE not in env or not is_loopback(address):
        return None
    with contextlib.suppress(OSError):
        return open_private(Path(env[NODE_DIR_VARIABLE]))
    return None


def meet_on_node(folder: PrivateFolder, port: int, info: RankInfo, timeout: datetime.timedelta) -> Store:
    """A new store for the ranks of this start, which MASTER_PORT tells from others in the same run. Collective.

    A small file holds the name of the store's own, and rank 0 a lock on it until all have come: so a name that
    rank 0 left behind, killed, is told from one that counts.

    Raises:
        UserError: another program of the same run is just meeting, or not all ranks came in time.
        OSError: the folder cannot be written to.
    """
    pointer = f"store-at-{port}"
    until = time.monotonic() + timeout.total_seconds()
    with _named(folder, pointer) if info.rank == 0 else nullcontext(_wait_for_name(folder, pointer, until)) as name:
        if name is None:
            raise UserError(f"rank {info.rank} waited {timeout.total_seconds():.0f} s for rank 0 of "
                            f"{info.world_size} ranks", where=str(folder.path), instead="see rank 0's output")
        store = FileStore(str(folder.path / name), info.world_size)
        store.set_timeout(timeout)
        if store.add("met", 1) == info.world_size:
            store.set("all met", "")
        try:
            store.wait(["all met"])
        except RuntimeError as error:
            raise UserError(f"rank {info.rank} did not meet all of {info.world_size} ranks within "
                            f"{timeout.total_seconds():.0f} s", where=str(folder.path),
                            instead="see the output of those that are missing") from error
    return store


def new_name() -> str:
    """A name for a store's file."""
    return f"store-{os.urandom(8).hex()}"


@contextlib.contextmanager
def _named(folder: PrivateFolder, pointer: str) -> Iterator[str]:
    """Rank 0: a new name, which the others find meanwhile."""
    handle = folder.open(pointer, os.O_RDWR | os.O_CREAT)
    try:
        until = time.monotonic() + _LOCK_WITHIN_S
        while not _lock(handle, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise UserError("another program of this run is just being set up", where=str(folder.path),
                                instead="one after the other, or a launch for each")
            time.sleep(0.01)
        name = new_name()
        os.ftruncate(handle, 0)
        os.pwrite(handle, name.encode(), 0)
        yield name
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _wait_for_name(folder: PrivateFolder, pointer: str, deadline: float) -> str | None:
    """The others: the name, once rank 0 holds its lock; None where that takes too long."""
    pause = 0.005
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            handle = folder.open(pointer, os.O_RDONLY)
            try:
                if not _lock(handle, fcntl.LOCK_SH) and (name := os.pread(handle, 64, 0).decode()):
                    return name
            finally:
                os.close(handle)
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_S, 1.5 * pause)
    return None


def _lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
