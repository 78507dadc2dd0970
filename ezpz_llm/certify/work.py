"""A job of ranks at work: cells one after the other in one process group."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_llm.certify.cells import Cell
from ezpz_llm.dist import Heartbeat
from ezpz_llm.launch.phases import EVALUATING, TRAINING
from ezpz_llm.rundir import append_line, read_lines, write_json

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist

COLLECTIVE_TIMEOUT_S = 240.0
"""How long a rank waits for another; a whole reference is computed in that time."""


@dataclass(frozen=True)
class Job:
    """What one job of ranks does below `root`: references first, on rank 0, then cells."""

    root: Path
    references: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]
    steps: int
    device: str

    def write(self, path: Path) -> None:
        write_json(path, {**asdict(self), "root": str(self.root)})

    @classmethod
    def read(cls, path: Path) -> Job:
        stored = json.loads(path.read_text())
        return cls(Path(stored["root"]), tuple(map(tuple, stored["references"])),
                   tuple(Cell(**cell) for cell in stored["cells"]), stored["steps"], stored["device"])


def results_file(root: Path) -> Path:
    return root / "cells.jsonl"


def failed_files(root: Path) -> list[Path]:
    """What ended a job, written by the ranks that it happened to."""
    return sorted((root / "failed").glob("rank*.json"))


def reference_numbers(root: Path, model: str, dtype: str, steps: int) -> Path:
    """The file that is written last of a reference."""
    return root / "reference" / f"{model}-{dtype}-{steps}" / "reference.json"


def results(root: Path) -> list[dict[str, Any]]:
    """What was found so far."""
    return list(read_lines(results_file(root)))


def work(job: Job, dist: Dist, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Do a job; rank 0 also appends each result to the results' file. Collective."""
    from ezpz_llm.certify.cell import certify_cell
    from ezpz_llm.certify.reference import make_reference

    heartbeat = Heartbeat(os.environ)
    heartbeat.beat(EVALUATING)
    if dist.is_main:
        for model, dtype in job.references:
            say(f"reference: {model} {dtype} in one process")
            make_reference(job.root, model, dtype, job.steps, dist)
    dist.barrier()
    found = []
    for number, cell in enumerate(job.cells):
        heartbeat.beat(TRAINING, number)
        say(f"{cell.title} …")
        result = _guarded(certify_cell, cell, job, dist)
        found.append(result)
        if dist.is_main:
            append_line(results_file(job.root), result)
        say(f"{cell.title}: {'the same' if result['passed'] else 'NOT the same'} ({result['seconds']:.1f} s)")
        for line in result["failures"]:
            say(f"    {line}")
    return found


def _guarded(run: Callable[..., dict[str, Any]], cell: Cell, job: Job, dist: Dist) -> dict[str, Any]:
    try:
        return run(cell, job.root, job.steps, dist)
    except Exception as error:
        # The other ranks may be anywhere: this ends the job, and leaves behind why.
        folder = job.root / "failed"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"rank{dist.rank:04d}.json",
                   {"cell": asdict(cell), "rank": dist.rank, "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc()})
        raise


def references_of(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """(model, dtype) of every reference that cells need."""
    return tuple(dict.fromkeys((cell.model, cell.dtype) for cell in cells))
