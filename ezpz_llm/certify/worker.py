"""Ranks of certify: those that it starts, which do the job in a file, and those that a launcher started."""

from __future__ import annotations

import os
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, run_command
from ezpz_llm.base.parser import CommandParser
from ezpz_llm.certify.case import certify_case
from ezpz_llm.certify.cases import Work
from ezpz_llm.certify.definitions import hold_to_definitions
from ezpz_llm.certify.lead import Job, definitions_file, references_of, refuse, results_file
from ezpz_llm.certify.paths import hold_to_definition
from ezpz_llm.certify.reference import make_reference
from ezpz_llm.certify.report import all_passed, conclude
from ezpz_llm.certify.target_case import certify_target
from ezpz_llm.certify.target_reference import make_target_reference
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.dist.agree import together
from ezpz_llm.dist.setup import setup
from ezpz_llm.launch.variables import EVALUATING, TRAINING
from ezpz_llm.observe import run_environment
from ezpz_llm.rundir import append_line, update_record, write_json


def main(argv: Sequence[str]) -> int:
    """Do the job; 0 when it came to its end, whatever the verdicts."""
    parser = CommandParser("certify.worker", description=__doc__)
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
    """Do a job; rank 0 also appends each result to the results' file. Nothing is compared with a process that is
    refused: then rank 0 writes down why. Collective.
    """
    def say(line: str) -> None:
        if dist.is_main:
            print(line, flush=True)

    heartbeat = Heartbeat(os.environ)

    def make_own(these: Sequence[tuple[str, str] | None]) -> None:
        """This rank's one of some references, if there is one: one process, held to the definition of the step.
        None stands for the definitions of what is around it.
        """
        for one in these[dist.rank:dist.rank + 1]:
            if one is None:
                with _recorded(job, dist, {"definitions": "all"}):
                    hold_to_definitions(job.root)
                continue
            model, dtype = one
            with _recorded(job, dist, {"reference": f"{model} {dtype}"}):
                if job.target is not None:
                    make_target_reference(job, model, dtype, dist)
                    continue
                hold_to_definition(model, dtype, dist)
                heartbeat.beat(EVALUATING)
                make_reference(job.root, model, dtype, job.steps, dist)

    asks = (bool(job.references) and job.target is None and not definitions_file(job.root).is_file()
            and not all(case.fault for case in job.cases))  # a fault is planted in layouts
    # The last round of references has often a rank to spare. What they find wrong is told first: it says where.
    todo: list[tuple[str, str] | None] = [*job.references, *([None] if asks else [])]
    for start in range(0, len(todo), dist.world_size):
        these = todo[start:start + dist.world_size]
        heartbeat.beat(EVALUATING)
        for one in these:
            say("definitions of the trainer's loop and what is beneath a step, in one process" if one is None
                else f"reference: {one[0]} {one[1]} in one process")
        try:
            together(dist, partial(make_own, these))
        except UserError as why:
            if dist.is_main:
                refuse(job.root, why)
            return []
    found = []
    for number, case in enumerate(job.cases):
        heartbeat.beat(TRAINING, number)
        say(f"{case.title} …")
        with _recorded(job, dist, {"case": asdict(case)}):
            result = (certify_case(case, job.root, job.steps, dist) if job.target is None
                      else certify_target(case, job, dist))
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
        job = Job(dist.run_dir.path, references_of(todo.cases), todo.cases, todo.steps, options.device, todo.target)
        found = work(job, dist)
        if dist.is_main:
            conclude(todo, options, argv, began, dist.run_dir, environment)
        dist.barrier()
    return 0 if all_passed(found, todo.skipped) else 1


@contextmanager
def _recorded(job: Job, dist: Dist, about: dict[str, Any]) -> Iterator[None]:
    """Leave behind why this rank failed: the other ranks may be anywhere, and this ends the job."""
    try:
        yield
    except Exception as error:
        folder = job.root / "failed"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"rank{dist.rank:04d}.json",
                   {**about, "rank": dist.rank, "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc()})
        raise


if __name__ == "__main__":
    raise SystemExit(run_command(main))
