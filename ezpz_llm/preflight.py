"""Check every node, device and link before a run, and name the unfit ones.

Exit code 0: fit, perhaps with warnings. 3: unfit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.verify.check.preflight.endpoint import Endpoint, rendezvous_point, shared_secret

LIMIT_S = 60.0


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    command = CommandParser("preflight", description=__doc__, shown=(
        "launch python3 -m ezpz_llm.preflight",
        "launch --preflight python3 -m ezpz_llm.train  the same, followed by the run"))
    command.add_argument("--limit", type=float, default=LIMIT_S, metavar="S",
                         help="report after this many seconds, even if a stage hangs (%(default)g)")
    command.add_argument("--run-dir", type=Path, metavar="D",
                         help="output directory (default: launch's, or a new one in runs/)")
    command.add_argument("--check", action="store_true", help="validate the options and exit")
    command.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks, for --check")
    return command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Only the processes that measure import torch."""
    options = parser().parse_args(argv)
    if not 10 <= options.limit < float("inf"):
        raise UserError(f"--limit {options.limit:g} is not a finite number of at least 10 s", where="--limit",
                        instead="--limit 10 or more")
    if options.check:
        return 0
    info = find_rank(os.environ)
    address, port = rendezvous_point(os.environ, info.world_size)
    given = options.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if info.world_size > 1 and not given:
        raise UserError(f"{info.world_size} ranks have no common run directory", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, or the same --run-dir for all")
    run_dir = RunDir(Path(given).absolute()) if given else default_run_dir("preflight")
    rendezvous = Endpoint(address, port, shared_secret(os.environ, run_dir))
    if info.rank == 0:
        from ezpz_llm.verify.check.preflight.coordinator import run_coordinator

        return run_coordinator(info, os.environ, run_dir.create(), rendezvous, options.limit)
    from ezpz_llm.verify.check.preflight.client import run_client

    return run_client(info, os.environ, run_dir, rendezvous, options.limit)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
