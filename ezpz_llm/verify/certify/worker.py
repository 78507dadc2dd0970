"""Ranks of certify. certify starts them with a job file, or the user starts them with launch."""

from __future__ import annotations

import gc
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ezpz_llm.core.base import UserError, print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_json
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.basics.variables import EVALUATING, TRAINING
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.dist.agreement import PeerFailedError, run_together
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.observe import run_environment
from ezpz_llm.verify.certify.case import certify_case
from ezpz_llm.verify.certify.cases import Case, Work
from ezpz_llm.verify.certify.local_launches import (
    Failure,
    Job,
    add_result,
    needed_references,
    write_reference_error,
)
from ezpz_llm.verify.certify.records import CaseResult
from ezpz_llm.verify.certify.reference import make_reference
from ezpz_llm.verify.certify.report import all_passed, conclude
from ezpz_llm.verify.certify.target_case import certify_target
from ezpz_llm.verify.certify.target_reference import make_target_reference
from ezpz_llm.verify.certify.uncovered_paths import check_paths


def main(argv: Sequence[str]) -> int:
    """Run a job file; return 0 if it finished, even if cases failed."""
    parser = CommandParser("certify.worker", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--world-size", type=int, default=1)
    options = parser.parse_args(argv)
    if options.check:
        return 0
    job = Job.read(options.job)
    with setup(device=job.device, name="certify", timeout_s=_COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        if dist.is_main:
            update_record(dist.run_dir, environment=environment)
        run_job(job, dist)
    return 0


_COLLECTIVE_TIMEOUT_S = 240.0
"""Timeout of collectives: ranks wait in one while another rank computes a reference."""


def run_job(job: Job, dist: Dist) -> list[CaseResult]:
    """Compute a job's references, then run its cases, all in one process group. Collective.

    Rank 0 appends each result to the results file. If a reference fails, rank 0 records the reason, and no
    case runs.

    Returns:
        The results of the cases; empty if no case ran.
    """
    def print_on_main(line: str) -> None:
        if dist.is_main:
            print_lines(line)

    heartbeat = Heartbeat(os.environ)

    def compute_reference_of_rank(references: Sequence[tuple[str, str]]) -> None:
        """Compute this rank's reference, if it has one."""
        for model, dtype in references[dist.rank:dist.rank + 1]:
            with _record_failure(job, dist, reference=f"{model} {dtype}"):
                if job.target is not None:
                    make_target_reference(job, model, dtype, dist)
                    continue
                check_paths(model, dtype, dist)
                heartbeat.beat(EVALUATING)
                make_reference(job.root, model, dtype, job.steps, dist)

    for start in range(0, len(job.references), dist.world_size):
        references = job.references[start:start + dist.world_size]
        heartbeat.beat(EVALUATING)
        for model, dtype in references:
            print_on_main(f"reference: {model} {dtype} in one process")
        try:
            run_together(dist, partial(compute_reference_of_rank, references))
        except PeerFailedError:
            raise
        except UserError as why:
            if dist.is_main:
                write_reference_error(job.root, why)
            return []
    results = []
    for number, case in enumerate(job.cases):
        heartbeat.beat(TRAINING, number)
        # Garbage collection and `live_storages` skip frozen objects, of which imports create hundreds of thousands.
        gc.freeze()
        print_on_main(f"{case.title} …")
        with _record_failure(job, dist, case=case):
            result = (certify_case(case, job.root, job.steps, dist) if job.target is None
                      else certify_target(case, job, dist))
        results.append(result)
        if dist.is_main:
            add_result(job.root, result)
        print_on_main(f"{case.title}: {'passed' if result.passed else 'FAILED'} ({result.seconds:.1f} s)")
        for line in result.failures:
            print_on_main(f"    {line}")
    return results


def run_on_launched_ranks(work: Work, options: Namespace, argv: Sequence[str], began: float) -> int:
    """Run the cases on the ranks of a launch; every rank returns the same exit code. Collective."""
    with setup(device=options.device, run_dir=options.run_dir, name="certify",
               timeout_s=_COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        job = Job(dist.run_dir.path, needed_references(work.cases), work.cases, work.steps, options.device,
                  work.target)
        results = run_job(job, dist)
        if dist.is_main:
            conclude(work, options, argv, began, dist.run_dir, environment)
        dist.barrier()
    return 0 if all_passed(results, work.skipped) else 1


@contextmanager
def _record_failure(job: Job, dist: Dist, *, reference: str | None = None,
                    case: Case | None = None) -> Iterator[None]:
    """Write an exception of this rank to a file before it ends the job. The arguments name the task."""
    try:
        yield
    except Exception as error:
        folder = job.root / "failed"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"rank{dist.rank:04d}.json", as_plain(Failure(
            dist.rank, f"{type(error).__name__}: {error}", traceback.format_exc(), reference, case)))
        raise


if __name__ == "__main__":
    raise SystemExit(run_command(main))
