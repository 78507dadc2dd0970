"""A job for ranks and the files it leaves behind (imports no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import read_json
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.certify.cells import Cell
from ezpz_llm.rundir import read_lines, write_json


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
        return as_dataclass(cls, read_json(path), str(path))


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


def references_of(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """(model, dtype) of every reference that cells need."""
    return tuple(dict.fromkeys((cell.model, cell.dtype) for cell in cells))
