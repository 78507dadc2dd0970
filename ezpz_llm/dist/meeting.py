"""Where the ranks meet before there is a process group: rank 0's store, and what they settle through it."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from ezpz_llm.errors import UserError
from ezpz_llm.launch.ports import holder
from ezpz_llm.launch.ranks import RankInfo

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_MPI_LAUNCHERS = ("Cray PALS", "Open MPI", "MVAPICH", "Hydra", "PMI", "jsrun")
"""Whose ranks can ask MPI where rank 0 is; names of `launch.ranks.FAMILIES`."""

_LEAVE_S = 10.0


def meet(info: RankInfo, env: Mapping[str, str], timeout: datetime.timedelta) -> tuple[Store, str, int]:
    """The store of rank 0, with its address and port: from the environment, else from MPI under a bare mpiexec.

    mpi4py is imported in that last case only.

    Raises:
        UserError: no MASTER_ADDR and no MPI launcher, an MPI that counts ranks otherwise than the environment, or
            rank 0 cannot be reached.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and not port:
        return _meet_over_mpi(info, timeout)
    if not address or not port:
        found, missing = ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        raise UserError(f"rank {info.rank} has {found}={env[found]} but no {missing}", where="environment",
                        instead=f"set {missing} too, or start with launch, which sets both")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT={port!r} is not a port number", where="environment")
    # torchrun's agent holds the port itself: its store is joined, not made again.
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(info, address, int(port), info.rank == 0 and not by_agent, timeout)
    return PrefixStore(f"ezpz_llm/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), address, int(port)


def _store(info: RankInfo, address: str, port: int, is_server: bool, timeout: datetime.timedelta) -> Store:
    try:
        return TCPStore(address, port, info.world_size, is_server, timeout)
    except (DistError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if is_server and "EADDRINUSE" in reason:
            raise UserError(f"rank {info.rank} cannot listen on port {port} of {socket.gethostname()}, which is "
                            f"taken: {holder(port)}", where=f"MASTER_PORT={port}",
                            instead="another MASTER_PORT; where it is not set, launch finds a free one") from error
        raise UserError(f"rank {info.rank} did not meet the others at MASTER_ADDR={address} MASTER_PORT={port}: "
                        f"{reason}", where=f"{socket.gethostname()}, one of {info.world_size} ranks",
                        instead="an address of rank 0's host that every host reaches, and a free port on it; "
                                "launch sets both") from error


def _meet_over_mpi(info: RankInfo, timeout: datetime.timedelta) -> tuple[Store, str, int]:
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
    server = None
    if info.rank == 0:
        # Port 0: bound before anybody hears of it, so that nobody can take it in between.
        server = TCPStore(address, 0, info.world_size, True, timeout, wait_for_workers=False)
    address, port = world.bcast((address, server.port) if server else None, root=0)
    return server or _store(info, address, port, False, timeout), address, port


def _own_address(world: Intracomm) -> str:
    """On rank 0, an address of this host that the other hosts reach. Collective."""
    own = socket.gethostname()
    names = world.gather(own, root=0) or []
    others = [name for name in names if name != own]
    if not others:
        return "127.0.0.1"
    # The address that packets to the last host leave from; a datagram socket sends none to find out.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((others[-1], 9))
        except OSError:
            return own
        return probe.getsockname()[0]


def raise_together(store: Store, info: RankInfo, error: UserError | None) -> None:
    """Raise one rank's error on every rank, if any rank has one: none is left waiting. Collective."""
    if error is not None:
        store.set("setup/error", str(error))
    if store.add("setup/arrived", 1) == info.world_size:
        store.set("setup/all", "")
    store.wait(["setup/all"])
    if not store.check(["setup/error"]):
        return
    found = store.get("setup/error").decode()
    # Rank 0 takes the store with it, so it leaves last.
    left = store.add("setup/left", 1)
    deadline = time.monotonic() + _LEAVE_S
    while info.rank == 0 and left < info.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        left = store.add("setup/left", 0)
    raise error or UserError(found)
