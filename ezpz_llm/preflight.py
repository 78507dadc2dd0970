"""Say before a run whether every host, device and link is fit for it, and name those that are not.

Exit code 0: fit, perhaps with warnings. 3: unfit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base import UserError, run_command
from ezpz_llm.base.parser import CommandParser
from ezpz_llm.check.server import Place, rendezvous_point, secret_of
from ezpz_llm.launch.ranks import find_rank
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir

LIMIT_S = 60.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = CommandParser("preflight", description=__doc__, shown=(
        "launch python3 -m ezpz_llm.preflight",
        "launch --preflight python3 -m ezpz_llm.train  the same, and then the run"))
    made.add_argument("--limit", type=float, default=LIMIT_S, metavar="S",
                      help="seconds until the report, whatever hangs (%(default)g)")
    made.add_argument("--run-dir", type=Path, metavar="D", help="where to write (launch's, or a new one in runs/)")
    made.add_argument("--check", action="store_true", help="only find what is wrong with the options")
    made.add_argument("--world-size", type=int, default=1, metavar="N", help="the number of ranks, for --check")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code. torch is imported only in the processes that measure."""
    options = parser().parse_args(argv)
    if not 10 <= options.limit < float("inf"):
        raise UserError(f"{options.limit:g} s are too few to report in", where="--limit", instead="10 or more")
    if options.check:
        return 0
    info = find_rank(os.environ)
    address, port = rendezvous_point(os.environ, info.world_size)
    given = options.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if info.world_size > 1 and not given:
        raise UserError(f"{info.world_size} ranks share no run directory", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, or the same --run-dir for all")
    run_dir = RunDir(Path(given).absolute()) if given else default_run_dir("preflight")
    rendezvous = Place(address, port, secret_of(os.environ, run_dir))
    if info.rank == 0:
        from ezpz_llm.check.coordinator import lead

        return lead(info, os.environ, run_dir.create(), rendezvous, options.limit)
    from ezpz_llm.check.client import follow

    return follow(info, os.environ, run_dir, rendezvous, options.limit)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
