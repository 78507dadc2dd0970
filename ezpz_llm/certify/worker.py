"""Ranks of certify: those that it starts, which do the job in a file, and those that a launcher started."""

from __future__ import annotations

import argparse
import os
import traceback
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import run_command
from ezpz_llm.certify.case import certify_case
from ezpz_llm.certify.cases import Case, Work
from ezpz_llm.certify.lead import Job, references_of, results_file
from ezpz_llm.certify.reference import (
    make_reference,
)
from ezpz_llm.certify.report import all_passed, conclude
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.dist.setup import setup
from ezpz_llm.launch.variables import EVALUATING, TRAINING
from ezpz_llm.observe import run_environment
from ezpz_llm.rundir import append_line, update_record, write_json


def main(argv: Sequence[str]) -> int:
    """Do the job; 0 when it came to its end, whatever the verdicts."""
    parser = argparse.ArgumentParser(prog="certify.worker", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--world-size", type=int, default=1)
    options = parser.parse_args(argv)
    if options.check:
        return 0
    job = Job.read(options.job)
    with setup(device=job.device, name="certify", timeout_s=COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        if dist.is_main:
            update_record(dist.run_dir, environment=environment)
        work(job, dist)
    return 0


# A job of ranks at work: cases one after the other in one process group.
COLLECTIVE_TIMEOUT_S = 240.0
"""Seconds that a rank waits for another; a whole reference is computed in that time."""


def work(job: Job, dist: Dist) -> list[dict[str, Any]]:
    """Do a job; rank 0 also appends each result to the results' file. Collective."""
    def say(line: str) -> None:
        if dist.is_main:
            print(line, flush=True)

    heartbeat = Heartbeat(os.environ)
    heartbeat.beat(EVALUATING)
    for model, dtype in job.references:
        say(f"reference: {model} {dtype} in one process")
        if dist.is_main:
            make_reference(job.root, model, dtype, job.steps, dist)
        dist.barrier()
    found = []
    for number, case in enumerate(job.cases):
        heartbeat.beat(TRAINING, number)
        say(f"{case.title} …")
        result = _guarded(case, job, dist)
        found.append(result)
        if dist.is_main:
            append_line(results_file(job.root), result)
        say(f"{case.title}: {'the same' if result['passed'] else 'NOT the same'} ({result['seconds']:.1f} s)")
        for line in result["failures"]:
            say(f"    {line}")
    return found


def follow(todo: Work, options: Namespace, argv: Sequence[str], began: float) -> int:
    """Do what fits these ranks; every rank returns the same exit code. Collective."""
    with setup(device=options.device, run_dir=options.run_dir, name="certify",
               timeout_s=COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        job = Job(dist.run_dir.path, references_of(todo.cases), todo.cases, todo.steps, options.device)
        found = work(job, dist)
        if dist.is_main:
            conclude(todo, options, argv, began, dist.run_dir, environment)
        dist.barrier()
    return 0 if all_passed(found, todo.skipped) else 1


def _guarded(case: Case, job: Job, dist: Dist) -> dict[str, Any]:
    try:
        return certify_case(case, job.root, job.steps, dist)
    except Exception as error:
        # The other ranks may be anywhere: this ends the job, and leaves behind why.
        folder = job.root / "failed"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"rank{dist.rank:04d}.json",
                   {"case": asdict(case), "rank": dist.rank, "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc()})
        raise


if __name__ == "__main__":
    raise SystemExit(run_command(main))
