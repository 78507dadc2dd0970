"""Rendezvous of the ranks before there is a process group: a store, and what they settle through it.

Who can connect to torch's network store can read and write it. So ranks of one node that launch started meet in a
file instead; elsewhere the store listens on one address only, its keys begin with a word that is not known to
strangers, and what we write there for people to read is signed. The section Security of docs/reference/launch.md
lists what is not protected.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hmac
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ezpz_llm.base import PrivateFolder, UserError, derived, open_private, run_secret
from ezpz_llm.launch.addresses import address_towards, holder, is_loopback, listen, resolve
from ezpz_llm.launch.master_variables import require_master_address, require_master_port
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.variables import NODE_DIR_VARIABLE

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_MPI_LAUNCHERS = ("Cray PALS", "Open MPI", "MVAPICH", "Hydra", "PMI", "jsrun")
"""Launchers under which ranks get rank 0's address from MPI; names of `launch.ranks.FAMILIES`."""

_LEAVE_S = 10.0
_RESOLVE_WITHIN_S, _RESOLVE_PAUSE_S = 30.0, 0.5


@dataclass(frozen=True)
class Rendezvous:
    """The ranks' store, MASTER_ADDR and MASTER_PORT, and the secret that they share (None: they have none)."""

    store: Store
    address: str
    port: int
    secret: bytes | None
    on_node: bool = False
    """Is the store a file of this node, which all ranks are on?"""


def rendezvous(info: RankInfo, env: Mapping[str, str], timeout: datetime.timedelta) -> Rendezvous:
    """The ranks' store: where the environment says, else where MPI says under a bare mpiexec. Collective.

    mpi4py is imported in that last case only.

    Raises:
        UserError: no MASTER_ADDR and no MPI launcher, an MPI that counts ranks otherwise than the environment, or
            rank 0 cannot be reached.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and not port:
        return _over_mpi(info, timeout)
    if not address or not port:
        found, missing = ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        raise UserError(f"rank {info.rank} has {found}={env[found]} but no {missing}", where="environment",
                        instead=f"set {missing} too, or start with launch, which sets both")
    require_master_address(address)
    require_master_port(port)
    secret = run_secret(env)
    if (folder := node_folder(address, env)) is not None:
        with folder:
            store = node_file_store(folder, int(port), info, timeout)
            return Rendezvous(store, address, int(port), secret, on_node=True)
    # torchrun's agent holds the port itself: its store is joined, not made again.
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = _listen(info, address, int(port)) if info.rank == 0 and not by_agent else None
    store = _store(info, address, int(port), listener, timeout)
    start = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = derived(secret, "store", start) if secret else start
    return Rendezvous(PrefixStore(f"ezpz_llm/{prefix}", store), address, int(port), secret)


def _listen(info: RankInfo, address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        raise UserError(f"rank {info.rank} cannot listen on port {port} of {socket.gethostname()}, which is "
                        f"taken: {holder(port)}", where=f"MASTER_PORT={port}",
                        instead="another MASTER_PORT; where it is not set, launch finds a free one") from error


def _store(info: RankInfo, address: str, port: int, listener: socket.socket | None,
           timeout: datetime.timedelta) -> Store:
    _require_resolving(info, address, min(_RESOLVE_WITHIN_S, timeout.total_seconds()))
    try:
        # From torch 2.5 on the store takes a listening socket, which it closes.
        return TCPStore(address, port, info.world_size, listener is not None, timeout,
                        master_listen_fd=None if listener is None else listener.detach())
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {info.rank} did not meet the others at MASTER_ADDR={address} MASTER_PORT={port}: "
                        f"{reason}", where=f"{socket.gethostname()}, one of {info.world_size} ranks",
                        instead="an address of rank 0's host that every host reaches, and a free port on it; "
                                "launch sets both") from error


def _require_resolving(info: RankInfo, address: str, limit_s: float) -> None:
    """Wait for the name service to know MASTER_ADDR: the store itself would try for its whole timeout.

    Raises:
        UserError: it does not within `limit_s`.
    """
    until = time.monotonic() + limit_s
    while resolve(address) is None:
        if time.monotonic() > until:
            raise UserError(f"rank {info.rank} cannot resolve MASTER_ADDR={address}",
                            where=f"{socket.gethostname()}, one of {info.world_size} ranks",
                            instead="an address of rank 0's host that every host reaches; launch sets one")
        time.sleep(_RESOLVE_PAUSE_S)


def _over_mpi(info: RankInfo, timeout: datetime.timedelta) -> Rendezvous:
    if not info.source.startswith(_MPI_LAUNCHERS):
        raise UserError(f"rank {info.rank} of {info.world_size} has no MASTER_ADDR",
                        where=f"environment ({info.source})",
                        instead="start with launch, or export MASTER_ADDR and MASTER_PORT of rank 0's host")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"rank {info.rank} has no MASTER_ADDR, and MPI cannot be asked: {error}",
                        where=f"environment ({info.source})",
                        instead="start with launch, or export MASTER_ADDR and MASTER_PORT") from error
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (info.rank, info.world_size):
        raise UserError(f"MPI says rank {world.Get_rank()} of {world.Get_size()}, the environment says rank "
                        f"{info.rank} of {info.world_size} ({info.source})",
                        instead="the mpiexec that belongs to mpi4py's MPI library, or launch")
    address = _own_address(world)
    listener, told = None, None
    if info.rank == 0:
        # Port 0: bound before anybody hears of it, so that nobody can take it in between.
        listener = listen(address, 0)
        told = address, listener.getsockname()[1], os.urandom(32)
    address, port, secret = world.bcast(told, root=0)
    store = _store(info, address, port, listener, timeout)
    return Rendezvous(PrefixStore(f"ezpz_llm/{derived(secret, 'store')}", store), address, port, secret)


def _own_address(world: Intracomm) -> str:
    """On rank 0, an address of this host that the other hosts reach. Collective."""
    own = socket.gethostname()
    names = world.gather(own, root=0) or []
    others = [name for name in names if name != own]
    return (address_towards(others[-1]) or own) if others else "127.0.0.1"


def raise_before_group(store: Store, info: RankInfo, error: UserError | None, secret: bytes | None) -> None:
    """Raise one rank's error on every rank before there is a process group, so that none is left waiting.

    With a process group use `agree.raise_together`. Ranks that share no secret raise without its text: whoever
    reaches the store can write there. Collective.
    """
    if error is not None:
        store.set("setup/error", _signed(str(error), secret))
    if store.add("setup/arrived", 1) == info.world_size:
        store.set("setup/all", "")
    store.wait(["setup/all"])
    if not store.check(["setup/error"]):
        return
    found = _verified(store.get("setup/error"), secret)
    if error is None and found is None and secret is not None:
        return  # a stranger wrote it
    # Rank 0 takes the store with it, so it leaves last.
    left = store.add("setup/left", 1)
    deadline = time.monotonic() + _LEAVE_S
    while info.rank == 0 and left < info.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        left = store.add("setup/left", 0)
    raise error or UserError(found or "another rank could not be set up",
                             instead=None if found else "see its output")


def _signed(text: str, secret: bytes | None) -> str:
    return f"{derived(secret, 'setup/error', text)}\n{text}" if secret else ""


def _verified(value: bytes, secret: bytes | None) -> str | None:
    """The text of `_signed`; None where it was not signed with this secret."""
    signature, _, text = value.decode(errors="replace").partition("\n")
    if not secret:
        return None
    return text if hmac.compare_digest(signature.encode(), derived(secret, "setup/error", text).encode()) else None


# The store of ranks that all run on one node: a file in the run's private folder there, so that nothing listens.
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


def node_file_store(folder: PrivateFolder, port: int, info: RankInfo, timeout: datetime.timedelta) -> Store:
    """Make a store for the ranks of this start, which MASTER_PORT tells from others in the same run. Collective.

    A small file holds the name of the store's own, and rank 0 a lock on it until all have come: so a name that
    rank 0 left behind, killed, is told from one that counts.

    Raises:
        UserError: another program of the same run is at its rendezvous, or not all ranks came in time.
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
