"""Run by two ranks: an exception of rank 1 in `run_together`, first caught by the ranks, then not.

    mpiexec -n 2 python3 tests/helpers/agreement_ranks.py RUN_DIR
"""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.core.base import UserError, run_command
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather, run_together
from ezpz_llm.training.dist.setup import setup


def fail_on_rank_1(dist: Dist) -> int:
    if dist.rank == 1:
        raise KeyError("planted")
    return dist.rank


def fail_on_both(dist: Dist) -> None:
    if dist.rank == 1:
        raise KeyError("planted")
    raise UserError("planted for the user")


def main(argv: list[str]) -> int:
    """Print each rank's error after every attempt; the last one ends the job."""
    with setup(device="cpu", run_dir=Path(argv[0])) as dist:
        for action in (fail_on_rank_1, fail_on_both):
            try:
                run_together(dist, lambda action=action: action(dist))
                error = "none"
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised!s}".splitlines()[0]
            errors = all_gather(dist, error)
            if dist.is_main:
                print(errors, flush=True)
        run_together(dist, lambda: fail_on_rank_1(dist))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
