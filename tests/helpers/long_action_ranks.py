"""Run by two ranks: actions of rank 0 that take longer than the timeout of collectives.

    mpiexec -n 2 python3 tests/helpers/long_action_ranks.py RUN_DIR
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.agreement import all_gather, run_long_on_main
from ezpz_llm.training.dist.setup import setup

TIMEOUT_S = scaled(5)


def prepare() -> str:
    time.sleep(1.5 * TIMEOUT_S)
    return "prepared"


def fail() -> None:
    raise UserError("there is no corpus")


if __name__ == "__main__":
    with setup(device="cpu", run_dir=Path(sys.argv[1]), timeout_s=TIMEOUT_S) as dist:
        result = run_long_on_main(dist, prepare)
        try:
            run_long_on_main(dist, fail)
            error = ""
        except UserError as raised:
            error = raised.found
        results = all_gather(dist, (result, error))
        if dist.is_main:
            print(results)
