"""Per-node wrapper, started by srun or mpiexec: it execs torchrun with this node's --node-rank. For launch only."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, run_command
from ezpz_llm.launcher.basics.cleanup import die_with_parent
from ezpz_llm.launcher.basics.ranks import OUTER_LAUNCHERS, find_rank
from ezpz_llm.launcher.basics.variables import WORLD_SIZE_VARIABLE

_LOG_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"


def main(argv: Sequence[str]) -> int:
    """Exec `TORCHRUN --node-rank N OPTIONS… -- COMMAND…`, given `NODES RANKS TORCHRUN OPTIONS… -- COMMAND…`.

    RANKS is the number of ranks on this node.

    Raises:
        UserError: the outer launcher did not start one process on each of NODES nodes.
    """
    nodes, ranks, program, *arguments = argv
    # PALS sets no world size, so find_rank uses launch's. Here it must be the number of torchruns, not of ranks.
    info = find_rank({**os.environ, WORLD_SIZE_VARIABLE: nodes})
    if info.world_size != int(nodes) or info.local_size != 1:
        raise UserError(f"launch requested one torchrun on each of {nodes} nodes, but this is process "
                        f"{info.rank} of {info.world_size} ({info.source})", where=socket.gethostname(),
                        instead="use the mpiexec (or srun) that belongs to this job",
                        exit_code=EXIT_PREFLIGHT)
    die_with_parent(signal.SIGTERM)
    env = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_LAUNCHERS)}
    # torchrun would set it to 1, regardless of the number of cores.
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))
    if _LOG_LEVEL_VARIABLE not in env:
        # The first torchrun to exit closes the store, and the other torchruns print long warnings about that.
        env[_LOG_LEVEL_VARIABLE] = "ERROR"
        command = arguments.index("--") + 1
        arguments[command:command] = ["env", "-u", _LOG_LEVEL_VARIABLE]
    os.execve(program, (program, "--node-rank", str(info.rank), *arguments), env)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
