"""A study: its points, in which order they are run, and `study.json`, which keeps what was asked."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import NoFile, read_json
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.rundir import RunDir, write_json
from ezpz_llm.rundir.secrets import without_secrets
from ezpz_llm.scaling.sample import Mode

_VERSION = 1


@dataclass(frozen=True)
class Point:
    """One size under one layout and mode. `launch` are the words for launch without hosts and run directory,
    `command` is the training command with its batch."""

    name: str
    mode: Mode
    ds_config: str
    nodes: int
    ranks: int
    global_batch: int
    micro_batch: int
    accumulation: int
    launch: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """Request of a study.

    `what` is scaling or layouts; `unit`, of the sizes, nodes or ranks; `hosts` the user's --hosts; `directory`
    where the command is to run, absolute; `threads` each rank's at every size: as many as at the largest, since a
    rank that has a host to itself would compute on all cores; `notes` what a reader should know of how the points
    came about.
    """

    what: str
    mode: str
    unit: str
    repeats: int
    seed: int
    typed: tuple[str, ...]
    directory: str
    hosts: str | None
    threads: int | None
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def point(self, name: str) -> Point:
        """The point of that name.

        Raises:
            UserError: there is none.
        """
        for point in self.points:
            if point.name == name:
                return point
        raise UserError(f"the study has no point {name!r}", instead=", ".join(point.name for point in self.points))

    def order(self) -> list[tuple[Point, int]]:
        """All runs as (point, repeat from 0). Each round has every point once, in an order of its own that the seed
        fixes: what changes with time falls on all points alike."""
        runs: list[tuple[Point, int]] = []
        for repeat in range(self.repeats):
            points = list(self.points)
            random.Random(f"{self.seed} {repeat}").shuffle(points)
            runs += [(point, repeat) for point in points]
        return runs

    def write(self, folder: Path) -> None:
        """Write study.json."""
        write_json(study_file(folder), {"version": _VERSION, **without_secrets(asdict(self), os.environ)})


def study_file(folder: Path) -> Path:
    """Path of a study's request."""
    return folder / "study.json"


def run_dir_of(folder: Path, point: Point, repeat: int) -> RunDir:
    """The run directory of a repeat."""
    return RunDir(folder / "points" / point.name / f"run-{repeat}")


def read_study(folder: Path) -> Study:
    """The study in `folder`.

    Raises:
        UserError: there is none, or its file is none of ours.
    """
    try:
        stored = read_json(study_file(folder))
    except NoFile:
        raise UserError("this is not a study: it has no study.json", where=str(folder),
                        instead="the folder that ezpz-llm scale named (runs/scale-…)") from None
    if not isinstance(stored, dict) or stored.pop("version", None) != _VERSION:
        raise UserError("study.json is none of this version", where=str(study_file(folder)))
    return as_dataclass(Study, stored, str(study_file(folder)))


def carve(hosts: Sequence[str], nodes: int, repeat: int) -> tuple[str, ...]:
    """The hosts of one repeat: neighbours in the reservation's order, others in every repeat, so that no size
    depends on one host alone."""
    first = repeat * nodes % len(hosts)
    return tuple(hosts[(first + step) % len(hosts)] for step in range(nodes))
