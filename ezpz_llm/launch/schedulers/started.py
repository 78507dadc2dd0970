"""Already a rank: torchrun, an MPI launcher or srun has started this very process as one of several."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ezpz_llm.launch.allocation import Allocation, Host
from ezpz_llm.launch.ranks import find_rank

NAME = "started"


def detect(env: Mapping[str, str]) -> Allocation | None:
    """This host with the ranks that are already on it, where the world is larger than one.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    info = find_rank(env)
    if info.world_size == 1:
        return None
    return Allocation(scheduler=NAME, job_id=None, hosts=(Host(socket.gethostname(), slots=info.local_size),),
                      ends_at=None, source=info.source, notes=info.notes)
