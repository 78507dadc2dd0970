"""Rendezvous: ranks join a torch store, from which they create the process group.

Anyone who can connect to a TCPStore can read and write it. If launch has placed all ranks on one node, they
therefore use a FileStore. Otherwise the store listens only on the address that MASTER_ADDR determines, if any, and
its keys have a secret prefix. The section Security of docs/reference/launch.md lists the remaining risks.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ezpz_llm.core.base import PrivateFolder, UserError, derive_key, open_private, run_secret
from ezpz_llm.launcher.basics.addresses import address_towards, describe_port_holder, is_loopback, listen, resolve
from ezpz_llm.launcher.basics.master_variables import require_master_address, require_master_port
from ezpz_llm.launcher.basics.ranks import MPI_FAMILIES, RankInfo
from ezpz_llm.launcher.basics.variables import NODE_DIR_VARIABLE

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_LEAVE_WITHIN_S = 10.0
_RESOLVE_WITHIN_S, _RESOLVE_PAUSE_S = 30.0, 0.5


@dataclass(frozen=True)
class Rendezvous:
    """Store of the ranks, with MASTER_ADDR and MASTER_PORT."""

    store: Store
    address: str
    port: int
    on_node: bool = False
    """True if all ranks are on this node and the store is a file."""


def rendezvous(info: RankInfo, env: Mapping[str, str], timeout: datetime.timedelta) -> Rendezvous:
    """Join the ranks' store at MASTER_ADDR and MASTER_PORT, or at an address that rank 0 sends over MPI.

    Collective. Uses MPI, under a plain mpiexec, only if the environment has neither variable.

    Raises:
        UserError: only one of the variables is set; both are missing without an MPI launcher or mpi4py; MPI and the
            environment disagree about ranks; rank 0 cannot listen on the port; or rank 0 is unreachable.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and not port:
        return _over_mpi(info, timeout)
    if not address or not port:
        present, missing = ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        raise UserError(f"rank {info.rank} has {present}={env[present]} but no {missing}", where="environment",
                        instead=f"set {missing} too, or start with launch, which sets both")
    require_master_address(address)
    require_master_port(port)
    if (folder := node_folder(address, env)) is not None:
        with folder:
            store = node_file_store(folder, int(port), info, timeout)
            return Rendezvous(store, address, int(port), on_node=True)
    # torchrun's agent already listens on the port, so rank 0 joins its store instead of creating one.
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = _listen(info, address, int(port)) if info.rank == 0 and not by_agent else None
    store = _store(info, address, int(port), listener, timeout)
    start = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = derive_key(secret, "store", start) if (secret := run_secret(env)) else start
    return Rendezvous(PrefixStore(f"ezpz_llm/{prefix}", store), address, int(port))


def _listen(info: RankInfo, address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        # Without the address that listen() adds to the message.
        reason = os.strerror(error.errno) if error.errno else str(error)
        holder = f": {describe_port_holder(port)}" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"rank {info.rank} cannot listen on port {port} of {socket.gethostname()}: "
                        f"{reason}{holder}", where=f"MASTER_PORT={port}",
                        instead="use another MASTER_PORT, or unset it and start with launch, which chooses a free "
                                "port") from error


def _store(info: RankInfo, address: str, port: int, listener: socket.socket | None,
           timeout: datetime.timedelta) -> Store:
    _require_resolving(info, address, min(_RESOLVE_WITHIN_S, timeout.total_seconds()))
    try:
        # From torch 2.5 on, TCPStore accepts a listening socket, which it closes.
        return TCPStore(address, port, info.world_size, listener is not None, timeout,
                        master_listen_fd=None if listener is None else listener.detach())
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {info.rank} could not join the store at MASTER_ADDR={address} MASTER_PORT={port}: "
                        f"{reason}", where=f"{socket.gethostname()}, one of {info.world_size} ranks",
                        instead="an address of rank 0's node that every node can reach, and a free port on it; "
                                "launch sets both") from error


def _require_resolving(info: RankInfo, address: str, limit_s: float) -> None:
    """Wait until MASTER_ADDR resolves. TCPStore would retry for its whole timeout.

    Raises:
        UserError: the name does not resolve within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while resolve(address) is None:
        if time.monotonic() > deadline:
            raise UserError(f"rank {info.rank} cannot resolve MASTER_ADDR={address}",
                            where=f"{socket.gethostname()}, one of {info.world_size} ranks",
                            instead="an address of rank 0's node that every node can reach; launch sets one")
        time.sleep(_RESOLVE_PAUSE_S)


def _over_mpi(info: RankInfo, timeout: datetime.timedelta) -> Rendezvous:
    if not info.source.startswith(MPI_FAMILIES):
        raise UserError(f"rank {info.rank} of {info.world_size} has no MASTER_ADDR",
                        where=f"environment ({info.source})",
                        instead="start with launch, or export MASTER_ADDR and MASTER_PORT of rank 0's node")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"rank {info.rank} has no MASTER_ADDR, and mpi4py cannot be imported: {error}",
                        where=f"environment ({info.source})",
                        instead="start with launch, or export MASTER_ADDR and MASTER_PORT") from error
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (info.rank, info.world_size):
        raise UserError(f"MPI reports rank {world.Get_rank()} of {world.Get_size()}, but the environment says rank "
                        f"{info.rank} of {info.world_size} ({info.source})",
                        instead="the mpiexec that belongs to mpi4py's MPI library, or launch")
    address = _own_address(world)
    listener, own_endpoint = None, None
    if info.rank == 0:
        # Port 0: the port is bound before it is announced, so that no other process can take it.
        listener = listen(address, 0)
        own_endpoint = address, listener.getsockname()[1], os.urandom(32)
    address, port, secret = world.bcast(own_endpoint, root=0)
    store = _store(info, address, port, listener, timeout)
    return Rendezvous(PrefixStore(f"ezpz_llm/{derive_key(secret, 'store')}", store), address, port)


def _own_address(world: Intracomm) -> str:
    """Return an address of this node that the other nodes can reach. Collective; only rank 0's result is valid."""
    own = socket.gethostname()
    names = world.gather(own, root=0) or []
    others = [name for name in names if name != own]
    return (address_towards(others[-1]) or own) if others else "127.0.0.1"


def share_error_without_group(store: Store, info: RankInfo, error: UserError | None) -> None:
    """Raise one rank's error on every rank before there is a process group, so that none is left waiting.

    Collective. With a process group, use `agreement.raise_together`.
    """
    if error is not None:
        store.set("setup/error", str(error))
    if store.add("setup/arrived", 1) == info.world_size:
        store.set("setup/all", "")
    store.wait(["setup/all"])
    if not store.check(["setup/error"]):
        return
    text = store.get("setup/error").decode(errors="replace")
    # The store disappears when rank 0 exits, so rank 0 waits for the other ranks.
    left = store.add("setup/left", 1)
    deadline = time.monotonic() + _LEAVE_WITHIN_S
    while info.rank == 0 and left < info.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        left = store.add("setup/left", 0)
    raise error or UserError(text)


_LOCK_WITHIN_S = 2.0
"""Time limit for rank 0 to get the lock, which other ranks hold only for a moment."""
_LONGEST_PAUSE_S = 0.1


def node_folder(address: str, env: Mapping[str, str]) -> PrivateFolder | None:
    """Return the run's private folder on this node, if launch placed all ranks on this node.

    Returns None for other runs, and in containers that do not share the node's /dev/shm.
    """
    if run_secret(env) is None or NODE_DIR_VARIABLE not in env or not is_loopback(address):
        return None
    with contextlib.suppress(OSError):
        return open_private(Path(env[NODE_DIR_VARIABLE]))
    return None


def node_file_store(folder: PrivateFolder, port: int, info: RankInfo, timeout: datetime.timedelta) -> Store:
    """Create or open the file store of ranks on one node. Collective.

    MASTER_PORT distinguishes programs of the same run. A pointer file holds the name of the store's file. Rank 0
    locks the pointer file until all ranks have joined. The other ranks use the name only while the file is locked,
    and so ignore a stale name from a killed rank 0.

    Raises:
        UserError: another program of the run is starting at the same time, or some ranks did not join in time.
        OSError: the folder is not writable.
    """
    pointer = f"store-at-{port}"
    deadline = time.monotonic() + timeout.total_seconds()
    with (_publish_name(folder, pointer) if info.rank == 0
          else nullcontext(_wait_for_name(folder, pointer, deadline))) as name:
        if name is None:
            raise UserError(f"rank {info.rank} waited {timeout.total_seconds():.0f} s, but rank 0 of "
                            f"{info.world_size} ranks did not create the store", where=str(folder.path),
                            instead="read rank 0's output")
        store = FileStore(str(folder.path / name), info.world_size)
        store.set_timeout(timeout)
        if store.add("met", 1) == info.world_size:
            store.set("all met", "")
        try:
            store.wait(["all met"])
        except RuntimeError as error:
            raise UserError(f"rank {info.rank} waited {timeout.total_seconds():.0f} s, but not all "
                            f"{info.world_size} ranks joined the store", where=str(folder.path),
                            instead="read the output of the missing ranks") from error
    return store


def new_name() -> str:
    """Return a random name for a store's file."""
    return f"store-{os.urandom(8).hex()}"


@contextlib.contextmanager
def _publish_name(folder: PrivateFolder, pointer: str) -> Iterator[str]:
    """Publish a new name. Call on rank 0; the other ranks can read it while the context is open."""
    handle = folder.open(pointer, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + _LOCK_WITHIN_S
        while not _lock(handle, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UserError("another program of this run is starting at the same time", where=str(folder.path),
                                instead="start the programs one after the other, or each with its own launch")
            time.sleep(0.01)
        name = new_name()
        os.ftruncate(handle, 0)
        os.pwrite(handle, name.encode(), 0)
        yield name
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _wait_for_name(folder: PrivateFolder, pointer: str, deadline: float) -> str | None:
    """Wait for the name that rank 0 publishes, and return it, or None at the deadline. Call on other ranks."""
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
