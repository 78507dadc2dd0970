"""Between srun or mpiexec and the torchrun of one host: it tells torchrun which host it is on. launch starts it;
nobody types it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from ezpz_llm.base import EXIT_PREFLIGHT, UserError, run_command
from ezpz_llm.launch.cleanup import die_with_parent
from ezpz_llm.launch.ranks import find_rank
from ezpz_llm.launch.variables import OUTER_LAUNCHERS, WORLD_SIZE_VARIABLE

_CHATTER = "TORCH_CPP_LOG_LEVEL"


def main(argv: Sequence[str]) -> int:
    """`NODES RANKS TORCHRUN WORDS… -- COMMAND…`: become `TORCHRUN --node-rank N WORDS… -- COMMAND…`.

    RANKS are those of this host.

    Raises:
        UserError: the outer launcher did not start one process on each of NODES hosts.
    """
    nodes, ranks, program, *words = argv
    # PALS says no size of its own, so launch's counts: here that of the torchruns, not that of the ranks.
    info = find_rank({**os.environ, WORLD_SIZE_VARIABLE: nodes})
    if info.world_size != int(nodes) or info.local_size != 1:
        raise UserError(f"one torchrun on each of {nodes} hosts was to be started, but this one finds itself "
                        f"{info.rank} of {info.world_size} ({info.source})", where=socket.gethostname(),
                        instead="use the mpiexec (or srun) that belongs to this reservation",
                        exit_code=EXIT_PREFLIGHT)
    die_with_parent(signal.SIGTERM)
    env = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_LAUNCHERS)}
    # torchrun's own default is 1, whatever the host has.
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))
    if _CHATTER not in env:
        # Of several torchruns the first to end takes the store with it, and the others complain at length.
        env[_CHATTER] = "ERROR"
        command = words.index("--") + 1
        words[command:command] = ["env", "-u", _CHATTER]
    os.execve(program, (program, "--node-rank", str(info.rank), *words), env)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
