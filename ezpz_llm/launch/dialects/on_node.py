"""Between srun or mpiexec and the torchrun of one host: it tells torchrun which host it is on. launch starts it;
nobody types it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from ezpz_llm.errors import EXIT_PREFLIGHT, UserError, run_command
from ezpz_llm.launch.leftovers import die_with_parent
from ezpz_llm.launch.ranks import find_rank
from ezpz_llm.launch.variables import WORLD_SIZE_VARIABLE

# What names the place of this one process in the outer launcher's world. torchrun's ranks inherit its environment,
# and an MPI in them would take all ranks of a host for the same one.
_OUTER = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "PALS_RANKID", "PALS_LOCAL_", "PALS_NODEID",
          "SLURM_PROCID", "SLURM_LOCALID")


def main(argv: Sequence[str]) -> int:
    """`NODES TORCHRUN WORDS…`: become `TORCHRUN --node-rank N WORDS…`.

    Raises:
        UserError: the outer launcher did not start one process on each of NODES hosts.
    """
    nodes, program, *words = argv
    # PALS says no size of its own, so launch's counts: here that of the torchruns, not that of the ranks.
    info = find_rank({**os.environ, WORLD_SIZE_VARIABLE: nodes})
    if info.world_size != int(nodes) or info.local_size != 1:
        raise UserError(f"one torchrun on each of {nodes} hosts was to be started, but this one finds itself "
                        f"{info.rank} of {info.world_size} ({info.source})", where=socket.gethostname(),
                        instead="use the mpiexec (or srun) that belongs to this reservation",
                        exit_code=EXIT_PREFLIGHT)
    die_with_parent(signal.SIGTERM)
    os.execve(program, (program, "--node-rank", str(info.rank), *words), _without_outer(os.environ))
    return 0


def _without_outer(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_OUTER)}


if __name__ == "__main__":
    sys.exit(run_command(main))
