"""Already a rank: torchrun, an MPI launcher or srun has started this very process as one of several."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ezpz_llm.launch.ranks import RankInfo, find_rank, leftovers
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host

NAME = "started"


def detect(env: Mapping[str, str]) -> Allocation | None:
    """This host with the ranks that are already on it, where the world is larger than one.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    info = rank_here(env)
    if info.world_size == 1 or _is_typed(info, env):
        return None
    return Allocation(scheduler=NAME, job_id=None, hosts=(Host(socket.gethostname(), slots=info.local_size),),
                      ends_at=None, source=info.source, notes=info.notes)


def rank_here(env: Mapping[str, str]) -> RankInfo:
    """The rank that this process is, `leftovers` left aside.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    left = leftovers(env)
    return find_rank({name: value for name, value in env.items() if name not in left})


def _is_typed(info: RankInfo, env: Mapping[str, str]) -> bool:
    """Is this the shell of `srun --pty`, which is task 0 of several whose others have no terminal? The tasks of a
    step inside it inherit the variable, but not the terminal."""
    return info.source.startswith("srun") and bool(env.get("SLURM_PTY_PORT")) and has_terminal()


def has_terminal() -> bool:
    """Has this process a controlling terminal, whatever its input and output are?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True
