"""Where rank 0 can be reached."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ezpz_llm.errors import UserError
from ezpz_llm.launch.ranks import RankInfo


def find_master(info: RankInfo, env: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of rank 0: from the environment, else agreed on over MPI under a bare mpiexec.

    mpi4py is imported in that last case only.

    Raises:
        UserError: no MASTER_ADDR and no MPI to ask, or an MPI that counts ranks otherwise than the environment.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if address and port:
        if not port.isdigit():
            raise UserError(f"MASTER_PORT={port!r} is not a port number", where="environment")
        return address, int(port)
    if address or port:
        found, missing = ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        raise UserError(f"rank {info.rank} has {found}={env[found]} but no {missing}", where="environment",
                        instead=f"set {missing} too, or start with launch, which sets both")
    if info.source.startswith(("torchrun", "srun", "Flux")):
        raise UserError(f"rank {info.rank} of {info.world_size} has no MASTER_ADDR",
                        where=f"environment ({info.source})",
                        instead="start with launch, or export MASTER_ADDR and MASTER_PORT of rank 0's host")
    return _over_mpi(info)


def _over_mpi(info: RankInfo) -> tuple[str, int]:
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
                        instead="the mpiexec that belongs to mpi4py's MPI library")
    mine = _reachable_address(info), _free_port()
    return world.bcast(mine if info.rank == 0 else None, root=0)


def _reachable_address(info: RankInfo) -> str:
    return "127.0.0.1" if info.local_size == info.world_size else socket.gethostname()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
