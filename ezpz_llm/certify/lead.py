"""Certify from a single process: one launch, and one job file, for each world size (imports no torch)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from ezpz_llm.base import UserError, as_dataclass, as_type, read_json
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.certify.cases import Case, Work
from ezpz_llm.certify.injected_faults import find_fault
from ezpz_llm.certify.target_file import TargetFile
from ezpz_llm.launch.child import launch_words, run_launch
from ezpz_llm.rundir import RunDir, append_line, read_lines, read_record, write_json

_START_S, _REFERENCE_S, _CASE_S = 120, 180, 90
_IDLE_S = 240


def lead(work: Work, root: Path) -> dict[str, Any]:
    """Run everything; what `run_environment` told of the ranks. Results are in the results' file; where one process
    is not what it must be, or could not be run, the refusal's file says so and nothing more is run.
    """
    environment: dict[str, Any] = {}
    for world in sorted({case.world for case in work.cases}):
        cases = [case for case in work.cases if case.world == world]
        attempt = 0
        while cases:
            attempt += 1
            references = _missing_references(work, root, world)
            folder = root / (f"world-{world}" if attempt == 1 else f"world-{world}-{attempt}")
            before = len(results(root))
            job = Job(root, references, tuple(cases), work.steps, work.device, work.target)
            code = _launch(job, world, folder)
            seen = read_record(RunDir(folder)).get("environment", {})
            environment = environment or seen
            cases = cases[len(results(root)) - before:]
            why = _take_failure(root, code, folder)
            # Ranks that could not even be set up have said nothing of the references.
            if code and seen and _missing_references(work, root, world):
                refuse(root, UserError(f"the reference could not be computed: {why}",
                                       instead=f"ezpz-llm why {folder}"))
            if refusal(root) is not None:
                return environment
            # Nor will they be set up (too few devices, say) for the next case.
            lost = cases[:1] if seen else cases
            for case in lost:
                append_line(results_file(root), {**asdict(case), "passed": False, "failures": [why],
                                                 "kinds": ["error"], "worst": {}, "seconds": 0.0})
                print(f"{case.title}: NOT the same\n    {why}", flush=True)
            cases = cases[len(lost):]
    return environment


def _missing_references(work: Work, root: Path, world: int) -> tuple[tuple[str, str], ...]:
    """Those still to be made; the first job whose ranks can be set up makes all of them, and of a target those for
    so many ranks.
    """
    if work.target is None:
        return tuple(one for one in references_of(work.cases)
                     if not reference_numbers(root, *one, work.steps).is_file())
    return tuple(one for one in references_of([case for case in work.cases if case.world == world])
                 if not reference_numbers(root, *one, work.steps, world).is_file())


def _launch(job: Job, world: int, folder: Path) -> int:
    """One job of ranks; its exit code."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    job_file = folder.with_suffix(".job.json")
    job.write(job_file)
    limit = _START_S + _REFERENCE_S * len(job.references) + _CASE_S * len(job.cases)
    words = launch_words(["-n", str(world), "--run-dir", str(folder), "--idle-timeout", str(_IDLE_S)],
                         [sys.executable, "-m", "ezpz_llm.certify.worker", str(job_file)])
    print(f"{world} rank{'s' * (world > 1)}: {len(job.cases)} to certify", flush=True)
    return run_launch(words, limit_s=limit, end_within_s=30.0)


class _Failure(TypedDict):
    rank: int
    error: str


def _take_failure(root: Path, code: int, folder: Path) -> str:
    """Why a job ended early: the first rank's own error, else the exit code. The records are used up."""
    told = []
    for path in sorted((root / "failed").glob("rank*.json")):
        told.append(as_type(_Failure, read_json(path), str(path)))
        path.rename(folder / path.name)
    if told:
        return f"{told[0]['error']} (rank {told[0]['rank']}; see {folder})"
    return f"its ranks ended with code {code}; {typable(f'ezpz-llm why {folder}')}"


# A job for ranks and the files it leaves behind.
@dataclass(frozen=True)
class Job:
    """A job of ranks below `root`: references first, each made by one rank, then cases by all of them."""

    root: Path
    references: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...]
    steps: int
    device: str
    target: TargetFile | None = None

    def write(self, path: Path) -> None:
        """Write the job's file."""
        write_json(path, {**asdict(self), "root": str(self.root)})

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job's file."""
        return as_dataclass(cls, read_json(path), str(path))


def results_file(root: Path) -> Path:
    """Path of the results, one JSON object a line."""
    return root / "cells.jsonl"


def refuse(root: Path, why: UserError) -> None:
    """Write down why one process is no reference, so that no layout is compared with it."""
    write_json(_refusal_file(root), {"why": why.found, "instead": why.instead or ""})


def refusal(root: Path) -> dict[str, str] | None:
    """What `refuse` wrote: "why", and "instead", what to do; None where nothing was refused."""
    path = _refusal_file(root)
    return as_type(dict[str, str], read_json(path), str(path)) if path.is_file() else None


def _refusal_file(root: Path) -> Path:
    return root / "refused.json"


def reference_numbers(root: Path, model: str, dtype: str, steps: int, world: int | None = None) -> Path:
    """The file that is written last of a reference.

    Args:
        world: of a target, the number of ranks that it is compared with.
    """
    ranks = "" if world is None else f"-for-{world}-ranks"
    return root / "reference" / f"{model}-{dtype}-{steps}{ranks}" / "reference.json"


class Definition(TypedDict):
    """A topic of `ezpz_llm/certify/definitions.py`: what is wrong with it, None if nothing, and its seconds."""

    what: str
    wrong: str | None
    seconds: float


def definitions_file(root: Path) -> Path:
    """The file of the topics that were checked, in their order."""
    return root / "reference" / "definitions.json"


def definitions(root: Path) -> list[Definition]:
    """What that file says; nothing where they were not checked."""
    path = definitions_file(root)
    return as_type(list[Definition], read_json(path), str(path)) if path.is_file() else []


def results(root: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return list(read_lines(results_file(root)))


def references_of(cases: Sequence[Case]) -> tuple[tuple[str, str], ...]:
    """(model, dtype) of every reference that cases need: one whose fault all layouts share has the definition."""
    return tuple(dict.fromkeys((case.model, case.dtype) for case in cases
                               if not (case.fault and find_fault(case.fault).shared)))
