"""Say whether parallel layouts compute what one process computes."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from collections.abc import Sequence

from ezpz_llm.base.errors import UserError, run_command
from ezpz_llm.certify.cases import Work, parser, plan
from ezpz_llm.certify.lead import lead, results
from ezpz_llm.certify.report import conclude
from ezpz_llm.launch.ranks import ALONE, find_rank
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0 only if everything is the same maths."""
    options = parser().parse_args(argv)
    if options.check:
        plan(options, options.world_size)
        return 0
    began = time.perf_counter()
    info = find_rank(os.environ)
    if info.source != ALONE or RUN_DIR_VARIABLE in os.environ:
        work = plan(options, info.world_size)
        from ezpz_llm.certify.worker import follow

        return follow(work, options, argv, began)
    return _lead(plan(options), options, argv, began)


def _lead(work: Work, options: Namespace, argv: Sequence[str], began: float) -> int:
    run_dir = RunDir((options.run_dir or default_run_dir("certify").path).absolute()).create()
    if results(run_dir.path):
        raise UserError("the run directory holds another certify's results", where=str(run_dir.path),
                        instead="another --run-dir")
    signal.signal(signal.SIGTERM, _end)
    environment = lead(work, run_dir.path)
    return conclude(work, options, argv, began, run_dir, environment)


def _end(number: int, frame: object) -> None:
    """Leave by way of what ends the launch that is under way."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
