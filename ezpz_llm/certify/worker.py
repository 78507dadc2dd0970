"""The ranks that certify starts: does the job in a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.errors import run_command


def main(argv: Sequence[str]) -> int:
    """Do the job; 0 when it came to its end, whatever the verdicts."""
    parser = argparse.ArgumentParser(prog="certify.worker", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--world-size", type=int, default=1)
    options = parser.parse_args(argv)
    if options.check:
        return 0
    from ezpz_llm.certify.job import Job
    from ezpz_llm.certify.work import COLLECTIVE_TIMEOUT_S, work
    from ezpz_llm.dist.setup import setup
    from ezpz_llm.observe import run_environment
    from ezpz_llm.rundir import update_record

    job = Job.read(options.job)
    with setup(device=job.device, name="certify", timeout_s=COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        if dist.is_main:
            update_record(dist.run_dir, environment=environment)
        work(job, dist, say=lambda line: print(line, flush=True) if dist.is_main else None)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
