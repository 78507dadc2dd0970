"""Certify from a single process: one launch, and one job file, for each world size (imports no torch)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import read_json
from ezpz_llm.base.schema import as_dataclass, as_type
from ezpz_llm.certify.cases import Case, Work
from ezpz_llm.launch.child import launch_words, run_launch
from ezpz_llm.rundir import RunDir, append_line, read_lines, read_record, write_json

_START_S, _REFERENCE_S, _CASE_S = 120, 120, 90
_IDLE_S = 240


def lead(work: Work, root: Path) -> dict[str, Any]:
    """Run everything; what `run_environment` told of the ranks. Results are in the results' file.

    Raises:
        UserError: the reference could not be computed.
    """
    environment: dict[str, Any] = {}
    # The job of one rank comes first, also without cases of its own: it makes the references.
    for world in sorted({1, *(case.world for case in work.cases)}):
        cases = [case for case in work.cases if case.world == world]
        references, attempt = references_of(work.cases) if world == 1 else (), 0
        while cases or references:
            attempt += 1
            folder = root / (f"world-{world}" if attempt == 1 else f"world-{world}-{attempt}")
            before = len(results(root))
            code = _launch(Job(root, references, tuple(cases), work.steps, work.device), world, folder)
            seen = read_record(RunDir(folder)).get("environment", {})
            environment = environment or seen
            cases, references = cases[len(results(root)) - before:], ()
            why = _take_failure(root, code, folder)
            if code and not all(reference_numbers(root, model, dtype, work.steps).is_file()
                                for model, dtype in references_of(work.cases)):
                raise UserError(f"the reference could not be computed: {why}", where=str(folder), exit_code=1,
                                instead=f"ezpz-llm why {folder}")
            # Ranks that could not even be set up (too few devices, say) will not be for the next case either.
            lost = cases[:1] if seen else cases
            for case in lost:
                append_line(results_file(root), {**asdict(case), "passed": False, "failures": [why],
                                                 "kinds": ["error"], "worst": {}, "seconds": 0.0})
                print(f"{case.title}: NOT the same\n    {why}", flush=True)
            cases = cases[len(lost):]
    return environment


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
    return f"its ranks ended with code {code}; ezpz-llm why {folder}"


# A job for ranks and the files it leaves behind.
@dataclass(frozen=True)
class Job:
    """A job of ranks below `root`: references first, on rank 0, then cases."""

    root: Path
    references: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...]
    steps: int
    device: str

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


def reference_numbers(root: Path, model: str, dtype: str, steps: int) -> Path:
    """The file that is written last of a reference."""
    return root / "reference" / f"{model}-{dtype}-{steps}" / "reference.json"


def results(root: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return list(read_lines(results_file(root)))


def references_of(cases: Sequence[Case]) -> tuple[tuple[str, str], ...]:
    """(model, dtype) of every reference that cases need."""
    return tuple(dict.fromkeys((case.model, case.dtype) for case in cases))
