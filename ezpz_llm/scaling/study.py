"""A study: its points, in which order they are run, and its files `study.json` and `points.jsonl`."""

from __future__ import annotations

import math
import os
import random
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ezpz_llm.base import NoFile, UserError, as_dataclass, read_json
from ezpz_llm.rundir import RunDir, append_line, locked, read_lines, read_record, without_secrets, write_json

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


# Finished runs, one line each in points.jsonl.
Mode = Literal["weak", "strong"]

SPLIT = ("compute", "exposed_communication", "data", "optimizer", "other")
"""The keys of `Repeat.split`."""


@dataclass(frozen=True)
class Repeat:
    """One finished run of a point; everything is read from its run directory.

    A failed one has `error` set, with why, and what was measured is None or empty; batch and ranks are as planned.

    Attributes:
        point: the point's name, the same for all its repeats, such as `weak-ddp-n2`.
        mode: weak (fixed batch per device) or strong (fixed global batch).
        ranks: of the whole run; one device each.
        repeat: from 0.
        global_batch: sequences a step; `micro_batch` of them on each data-parallel rank, `accumulation` times.
        block_size: tokens of a sequence.
        step_times_s: seconds of each steady step in order (warm-up and the last left out). A step is over for all
            ranks when it is for the slowest.
        tokens_per_second: of all ranks, at the median step time.
        mfu: fraction of the device's vendor peak, None where that is unknown.
        peak_device_bytes, peak_host_bytes: of the rank that took most.
        split: seconds a step under the keys SPLIT, of the mean rank; None where no steps were traced.
        slowest_rank, slowest_host: which spent longest ahead of its collectives.
        first_loss, last_loss: of the first step, and the mean over the last tenth of the steps.
        run_dir: relative to the study's folder.
        error: why it failed, None where it did not.
    """

    point: str
    mode: Mode
    ds_config: str
    nodes: int
    ranks: int
    repeat: int
    global_batch: int
    micro_batch: int
    accumulation: int
    run_dir: str
    block_size: int = 0
    step_times_s: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    split: dict[str, float] | None = None
    slowest_rank: int | None = None
    slowest_host: str | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    error: str | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, all ranks."""
        return self.global_batch * self.block_size


def points_file(study: Path) -> Path:
    """Path of a study's finished repeats."""
    return study / "points.jsonl"


def add_repeat(study: Path, repeat: Repeat) -> None:
    """Append one line, in one write; jobs of one study may do so at the same time."""
    with locked(study, math.inf):
        append_line(points_file(study), asdict(repeat))


def read_repeats(study: Path) -> list[Repeat]:
    """The finished repeats in the order in which they finished, none before the first has; of one that was run
    again, the later.

    Raises:
        UserError: a line is none of ours.
    """
    path = points_file(study)
    found: dict[tuple[str, int], Repeat] = {}
    try:
        for line in read_lines(path):
            repeat = as_dataclass(Repeat, line, str(path), drop_unknown=True)
            found.pop((repeat.point, repeat.repeat), None)
            found[repeat.point, repeat.repeat] = repeat
    except UserError as error:
        raise UserError(f"after {len(found)} runs comes a line that is none of a study's: {error.found}",
                        where=error.where, instead="remove that line") from error
    return list(found.values())


# Provenance of a point: its exact command and the environment it ran in, from run.json.
@dataclass(frozen=True)
class Provenance:
    """`commands`: what was typed, and what that started. `environment`: versions, device, hosts, variables."""

    commands: tuple[str, ...]
    environment: dict[str, str]


def provenance_of(run_dirs: Sequence[Path]) -> Provenance:
    """Return the provenance of a point's runs: the first one's, with the nodes of each; without missing parts."""
    records = [read_record(RunDir(run_dir)) for run_dir in run_dirs]
    record = records[0]
    launch, environment = record.get("launch") or {}, record.get("environment") or {}
    commands = [shlex.join(words) for words in (launch.get("typed"), launch.get("argv")) if words]
    device = environment.get("device") or {}
    hosts = [" ".join((one.get("environment") or {}).get("hosts") or (one.get("launch") or {}).get("hosts") or ())
             for one in records]
    found: dict[str, Any] = {
        **(environment.get("versions") or {}),
        "platform": environment.get("platform"),
        "device": " ".join(str(device[key]) for key in ("type", "name") if device.get(key)) or None,
        "backend": environment.get("backend"),
        "threads": environment.get("threads"),
        "precision": record.get("precision"),
        "scheduler": launch.get("scheduler"),
        "launcher": " ".join(str(launch[key]) for key in ("launcher", "dialect") if launch.get(key)) or None,
        "hosts": ", then ".join(dict.fromkeys(filter(None, hosts))) or None,
        **(environment.get("variables") or {}), **(launch.get("env") or {}),
    }
    return Provenance(tuple(commands), {name: str(value) for name, value in found.items() if value is not None})
