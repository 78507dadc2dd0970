"""Internal command `python3 -m ezpz_llm.launcher.on_nodes.shim -- COMMAND…`, started by `launch`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import EXIT_PREFLIGHT, PrivateFolder, UserError, make_private, print_lines, run_command
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.launcher.basics.cleanup import die_with_parent
from ezpz_llm.launcher.basics.node_folder import register_shim
from ezpz_llm.launcher.basics.node_variables import restore_variables
from ezpz_llm.launcher.basics.ranks import RankInfo, find_rank
from ezpz_llm.launcher.basics.variables import (
    IN_COLOR,
    PATH_VARIABLE,
    RUN_ID_VARIABLE,
    TEE_VARIABLE,
    TERMINAL_VARIABLE,
    TORCHELASTIC_VARIABLE,
    TORCHS_OWN,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.launcher.on_nodes.shim.output import Output, max_log_bytes, open_log
from ezpz_llm.launcher.on_nodes.shim.rank import Rank, bind_to_cores


def main(argv: Sequence[str]) -> int:
    """Run `-- COMMAND…` as the rank that the environment specifies, and return its exit code."""
    if not argv or argv[0] != "--" or len(argv) < 2:
        raise UserError("the rank shim can only be started by launch", instead="launch COMMAND …")
    die_with_parent(signal.SIGTERM)
    if TORCHELASTIC_VARIABLE not in os.environ:
        for name in TORCHS_OWN:
            # Under ssh, this node's shell startup files may have set them.
            os.environ.pop(name, None)
    if path := os.environ.pop(PATH_VARIABLE, None):
        os.environ["PATH"] = path
    restore_variables(os.environ)
    info = find_rank(os.environ)
    run_dir = RunDir(Path(os.environ[RUN_DIR_VARIABLE]))
    _check_world(info)
    bind_to_cores(info, os.environ)
    folder = _open_node_folder(info, run_dir)
    try:
        log, handle = open_log(info, run_dir, folder)
    except OSError as error:
        raise UserError(f"rank {info.rank} on {os.uname().nodename} cannot write its log: {error.strerror}",
                        where=error.filename, exit_code=EXIT_PREFLIGHT,
                        instead="choose a --run-dir on a file system that all nodes share") from error
    agent = None
    if info.local_rank == 0 and folder is not None:
        # Imported here, because only one shim per node needs it.
        from ezpz_llm.launcher.on_nodes.node.agent import start_agent

        agent = start_agent(info, run_dir, os.environ[RUN_ID_VARIABLE], folder)
    # The variable is set for all ranks, but only rank 0's output reaches the terminal.
    is_colored = info.rank == 0 and os.environ.get(TERMINAL_VARIABLE, "").endswith(IN_COLOR)
    output = Output(info.rank, handle, os.environ.get(TEE_VARIABLE, "0"),
                    max_log_bytes(info, log != run_dir.rank_log(info.rank), os.environ), is_colored=is_colored)
    return Rank(info, run_dir, folder, list(argv[1:]), log, output, agent).run()


def _open_node_folder(info: RankInfo, run_dir: RunDir) -> PrivateFolder | None:
    try:
        return register_shim(info, os.environ)
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        print_lines(f"launch: rank {info.rank} on {os.uname().nodename}: cannot create a folder in memory or"
                    f" {os.environ.get('TMPDIR', '/tmp')} ({error.strerror}{where}): hangs cannot be detected here",
                    file=sys.stderr)
        with contextlib.suppress(OSError), make_private(run_dir.heartbeat) as reports:
            # No agent will report this rank as started.
            reports.touch(run_dir.rank_heartbeat(info.rank).name)
        return None


def _check_world(info: RankInfo) -> None:
    planned = int(os.environ[WORLD_SIZE_VARIABLE])
    if info.world_size != planned:
        raise UserError(f"launch started {planned} ranks, but this process is rank {info.rank} of"
                        f" {info.world_size} ({info.source})",
                        where=os.uname().nodename, exit_code=EXIT_PREFLIGHT,
                        instead="use the mpiexec (or srun --mpi plug-in) that belongs to this MPI")


if __name__ == "__main__":
    sys.exit(run_command(main))
