"""Run by two ranks: optional work fails on both, on rank 1 after its collective, on rank 0 before its collective.

    mpiexec -n 2 python3 tests/helpers/optional_ranks.py RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup


def sum_of_ranks(dist: Dist) -> float:
    value = torch.tensor([dist.rank + 1.0])
    torch.distributed.all_reduce(value)
    return value.item()


def main() -> None:
    """Print the result of each attempt on rank 0; the last one ends the job."""
    with setup(device="cpu", run_dir=Path(sys.argv[1])) as dist:
        dist.optional.within_s = 1.0

        def fail_everywhere() -> None:
            sum_of_ranks(dist)
            raise UserError("the logits are not finite")

        def fail_on_rank(rank: int, is_before: bool) -> float:
            if is_before and dist.rank == rank:
                raise RuntimeError("out of memory")
            total = sum_of_ranks(dist)
            if dist.rank == rank:
                raise RuntimeError("not a character")
            return total

        results = [dist.optional.attempt_together("everywhere", fail_everywhere),
                   dist.optional.attempt_together("on rank 1", lambda: fail_on_rank(1, is_before=False)),
                   dist.optional.attempt_together("nowhere", lambda: sum_of_ranks(dist)), sum_of_ranks(dist)]
        if dist.is_main:
            print(results, flush=True)
        dist.optional.attempt_together("in the middle", lambda: fail_on_rank(0, is_before=True))
        print("rank", dist.rank, "continued", flush=True)


if __name__ == "__main__":
    main()
