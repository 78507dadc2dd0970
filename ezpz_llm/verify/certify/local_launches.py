"""Run certify without launch: one launch and one job file per world size (imports no torch)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec import Struct

from ezpz_llm.core.base import UserError, print_lines, read_json
from ezpz_llm.core.base.records import Rank, as_plain, as_record
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir import RunDir, append_line, read_lines, write_json
from ezpz_llm.core.rundir.records import Environment, read_record
from ezpz_llm.launcher.basics.child import launch_words, run_launch
from ezpz_llm.verify.certify.cases import Case, Work
from ezpz_llm.verify.certify.injected_faults import find_fault
from ezpz_llm.verify.certify.records import CaseResult, Refused
from ezpz_llm.verify.certify.target_file import TargetFile

_START_S, _REFERENCE_S, _CASE_S = 120, 180, 90
"""Time limits: the start of a launch, each reference, each case."""
_IDLE_S = 240

MIDDLE = "middle"
"""Folder in the run directory with checkpoints that cases save, and later cases load."""


def run_cases(work: Work, root: Path) -> Environment | None:
    """Run all cases and return the `run_environment` of the ranks; None if none were set up.

    Results are appended to cells.jsonl. If the single-process reference is wrong or cannot be computed,
    `write_reference_error` records the reason and no further case runs. A case that ends its launch fails, and a
    new launch runs the remaining cases.
    """
    environment: Environment | None = None
    for world in sorted({case.world for case in work.cases}):
        cases = [case for case in work.cases if case.world == world]
        attempt = 0
        while cases:
            attempt += 1
            references = _missing_references(work, root, world)
            folder = root / (f"world-{world}" if attempt == 1 else f"world-{world}-{attempt}")
            finished = len(read_results(root))
            job = Job(root, references, tuple(cases), work.steps, work.device, work.target)
            code = _launch(job, world, folder)
            environment_of_ranks = read_record(RunDir(folder)).environment
            environment = environment or environment_of_ranks
            cases = cases[len(read_results(root)) - finished:]
            reason = _collect_failure(root, code, folder)
            # Without an environment the ranks failed in setup, before any reference was computed.
            if code and environment_of_ranks and _missing_references(work, root, world):
                write_reference_error(root, UserError(f"the reference could not be computed: {reason}",
                                                      instead=f"ezpz-llm why {folder}"))
            if read_reference_error(root) is not None:
                return environment
            # If setup failed (too few devices, for example), it will fail for the other cases too.
            failed = cases[:1] if environment_of_ranks else cases
            for case in failed:
                add_result(root, CaseResult(**asdict(case), passed=False, failures=[reason], kinds=["error"],
                                            worst={}, seconds=0.0))
                print_lines(f"{case.title}: FAILED\n    {reason}")
            cases = cases[len(failed):]
    return environment


def _missing_references(work: Work, root: Path, world: int) -> tuple[tuple[str, str], ...]:
    """Return the references that are still to be computed. A target has a separate one for each world size."""
    if work.target is None:
        return tuple(reference for reference in needed_references(work.cases)
                     if not reference_file(root, *reference, work.steps).is_file())
    return tuple(reference for reference in needed_references([case for case in work.cases if case.world == world])
                 if not reference_file(root, *reference, work.steps, world).is_file())


def _launch(job: Job, world: int, folder: Path) -> int:
    """Launch one job and return its exit code."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    job_file = folder.with_suffix(".job.json")
    job.write(job_file)
    limit = _START_S + _REFERENCE_S * len(job.references) + _CASE_S * len(job.cases)
    command = launch_words(["-n", str(world), "--run-dir", str(folder), "--idle-timeout", str(_IDLE_S)],
                           [sys.executable, "-m", "ezpz_llm.verify.certify.worker", str(job_file)])
    print_lines(f"{world} rank{'s' * (world > 1)}: {len(job.cases)} case{'s' * (len(job.cases) > 1)} to certify")
    return run_launch(command, limit_s=limit, end_within_s=30.0)


class Failure(Struct, frozen=True, omit_defaults=True):
    """Error of a rank, and the task that it ended: a reference or a case."""

    rank: Rank
    error: str
    traceback: str = ""
    reference: str | None = None
    case: Case | None = None


def _collect_failure(root: Path, code: int, folder: Path) -> str:
    """Return why a job ended early: the error of the lowest rank that recorded one, or else the exit code.

    Moves the failure records into `folder`.
    """
    failed = []
    for path in sorted((root / "failed").glob("rank*.json")):
        failed.append(as_record(Failure, read_json(path), str(path)))
        path.rename(folder / path.name)
    if failed:
        return f"{failed[0].error} (rank {failed[0].rank}; see {folder})"
    return f"the ranks ended with exit code {code}; {to_typable(f'ezpz-llm why {folder}')}"


@dataclass(frozen=True)
class Job:
    """References and cases for one launch. Each reference is computed by one rank, each case by all of them."""

    root: Path
    references: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...]
    steps: int
    device: str
    target: TargetFile | None = None

    def write(self, path: Path) -> None:
        """Write the job file."""
        write_json(path, as_plain(self))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job file."""
        return as_record(cls, read_json(path), str(path))


def _results_file(root: Path) -> Path:
    """Return the path of the results file, which has one JSON object per case and line."""
    return root / "cells.jsonl"


def write_reference_error(root: Path, why: UserError) -> None:
    """Record why the single-process reference is not usable, so that no layout is compared with it."""
    write_json(_reference_error_file(root), as_plain(Refused(why.found, why.instead or "")))


def read_reference_error(root: Path) -> Refused | None:
    """Return the recorded error of the reference and its fix, or None if there is none."""
    path = _reference_error_file(root)
    return as_record(Refused, read_json(path), str(path)) if path.is_file() else None


def _reference_error_file(root: Path) -> Path:
    return root / "refused.json"


def reference_file(root: Path, model: str, dtype: str, steps: int, world: int | None = None) -> Path:
    """Return the path of reference.json, which is written last, so that its existence marks a complete reference.

    Args:
        world: for a target, the world size of the cases that are compared with the reference.
    """
    ranks = "" if world is None else f"-for-{world}-ranks"
    return root / "reference" / f"{model}-{dtype}-{steps}{ranks}" / "reference.json"


def add_result(root: Path, result: CaseResult) -> None:
    """Append the result of a case to the results file."""
    append_line(_results_file(root), as_plain(result))


def read_results(root: Path) -> list[CaseResult]:
    """Return the results of the cases that have run."""
    path = _results_file(root)
    return [as_record(CaseResult, line, str(path)) for line in read_lines(path)]


def needed_references(cases: Sequence[Case]) -> tuple[tuple[str, str], ...]:
    """Return (model, dtype) of every reference that the cases need.

    A case with a shared fault needs no reference: it is compared with the step definition.
    """
    return tuple(dict.fromkeys((case.model, case.dtype) for case in cases
                               if not (case.fault and find_fault(case.fault).shared)))
