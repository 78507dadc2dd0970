"""Scaling study: its points, the order of its runs, and its files `study.json` and `points.jsonl`."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ezpz_llm.core.base import (
    MAX_NODES,
    MAX_REPEATS,
    MAX_SECONDS,
    MAX_TOKENS,
    NoFile,
    UserError,
    is_own,
    parse_json,
    read_json,
    read_own,
)
from ezpz_llm.core.base.records import (
    Bytes,
    Count,
    FileName,
    Finite,
    InnerPath,
    Positive,
    Rank,
    Ranks,
    Seconds,
    Whole,
    as_plain,
    as_record,
)
from ezpz_llm.core.rundir import RunDir, append_line, locked, read_lines, without_secrets, write_json
from ezpz_llm.core.rundir.records import Environment, Launch, read_record

_VERSION = 1
_MAX_RUNS = 100_000
"""Maximum number of runs of a study. Their order and their records are held in memory."""

Nodes = Annotated[int, Meta(ge=1, le=MAX_NODES)]


class Point(Struct, frozen=True):
    """Point of a study: a size under a layout and a mode.

    Attributes:
        launch: options for launch, without hosts and run directory.
        command: training command with its batch.
    """

    name: FileName
    mode: Mode
    ds_config: str
    nodes: Nodes
    ranks: Ranks
    global_batch: Count
    micro_batch: Count
    accumulation: Count
    launch: tuple[str, ...]
    command: tuple[str, ...]


class Study(Struct, frozen=True):
    """Definition of a study.

    Raises:
        UserError: it has too many runs, or two points of the same name.

    Attributes:
        unit: unit of the sizes, nodes or ranks.
        hosts: the user's --hosts.
        directory: absolute working directory of the command.
        threads: threads per rank at every size, which is the number at the largest size; by default, a rank alone
            on a node would use all its cores.
        notes: notes on how the points were chosen.
    """

    unit: str
    repeats: Annotated[int, Meta(ge=1, le=MAX_REPEATS)]
    seed: Whole
    typed: tuple[str, ...]
    directory: str
    hosts: str | None
    threads: Count | None
    points: Annotated[tuple[Point, ...], Meta(min_length=1)]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.points) * self.repeats > _MAX_RUNS:
            raise UserError(f"{len(self.points)} points x {self.repeats} repeats are more than {_MAX_RUNS:,} runs",
                            where="the study", instead="fewer --repeats, sizes, or layouts")
        if len({point.name for point in self.points}) < len(self.points):
            raise UserError("two points have the same name", where="the study", instead="a new --study")

    def point(self, name: str) -> Point:
        """Return the point named `name`.

        Raises:
            UserError: there is no such point.
        """
        for point in self.points:
            if point.name == name:
                return point
        raise UserError(f"the study has no point {name!r}", instead=", ".join(point.name for point in self.points))

    def order(self) -> list[tuple[Point, int]]:
        """Return all runs as (point, repeat from 0).

        Each round contains every point once, in a random order fixed by the seed, so that drift over time affects
        all points equally.
        """
        runs: list[tuple[Point, int]] = []
        for repeat in range(self.repeats):
            points = list(self.points)
            random.Random(f"{self.seed} {repeat}").shuffle(points)
            runs += [(point, repeat) for point in points]
        return runs

    def write(self, folder: Path) -> None:
        """Write study.json."""
        write_json(study_file(folder), {"version": _VERSION, **without_secrets(as_plain(self), os.environ)})


def study_file(folder: Path) -> Path:
    """Return the path of a study's definition."""
    return folder / "study.json"


def run_dir_of(folder: Path, point: Point, repeat: int) -> RunDir:
    """Return the run directory of a repeat."""
    return RunDir(folder / "points" / point.name / f"run-{repeat}")


def read_study(folder: Path) -> Study:
    """Read the study in `folder`, perhaps of another user, to report it.

    Raises:
        UserError: there is no study, or its file is invalid or from another version.
    """
    with _explained_missing_study(folder):
        return _as_study(read_json(study_file(folder)), folder)


def read_own_study(folder: Path) -> Study:
    """Read the study in `folder`, to run its commands.

    Raises:
        UserError: as in `read_study`; or another user owns the folder or the file, or can write them.
    """
    with _explained_missing_study(folder):
        # Resolve links once, so that the file is read from the folder whose owner was checked.
        path = study_file(folder.resolve())
        content = read_own(path)
    if content is None or not is_own(path.parent):
        raise UserError("another user owns this study or can write it, and --study would run its commands",
                        where=str(folder), instead=f"ezpz-llm scale report {folder} for its results, or a study of "
                                                   "your own")
    return _as_study(parse_json(content, str(path)), folder)


@contextlib.contextmanager
def _explained_missing_study(folder: Path) -> Iterator[None]:
    try:
        yield
    except NoFile:
        raise UserError("this is not a study: it has no study.json", where=str(folder),
                        instead="the folder that ezpz-llm scale printed (runs/scale-…)") from None


def _as_study(stored: Any, folder: Path) -> Study:
    if not isinstance(stored, dict) or stored.get("version") != _VERSION:
        raise UserError("study.json was written by another version", where=str(study_file(folder)))
    return as_record(Study, stored, str(study_file(folder)))


def nodes_of_repeat(hosts: Sequence[str], nodes: int, repeat: int) -> tuple[str, ...]:
    """Return the nodes of one repeat: consecutive in the allocation, and shifted with each repeat.

    Because of the shift, the result of a size does not depend on a single node.
    """
    first = repeat * nodes % len(hosts)
    return tuple(hosts[(first + step) % len(hosts)] for step in range(nodes))


Mode = Literal["weak", "strong"]

SPLIT = ("compute", "exposed_communication", "data", "optimizer", "other")
"""Keys of `Repeat.split`."""

StepSeconds = Annotated[float, Meta(ge=1e-7, le=MAX_SECONDS)]


class Repeat(Struct, frozen=True):
    """Measurements of one finished run of a point, read from its run directory.

    For a failed run, `error` is set and measurements are None or empty; batch and ranks are those planned.

    Attributes:
        point: name of the point, such as `weak-ddp-n2`.
        mode: weak (fixed batch per device) or strong (fixed global batch).
        ranks: world size; each rank has one device.
        repeat: number of the run, from 0.
        global_batch: sequences per step: `micro_batch` on each data-parallel rank, `accumulation` times.
        block_size: tokens per sequence.
        step_times_s: times of the steady steps in order, without warm-up and the last step. The slowest rank
            determines a step's time.
        tokens_per_second: throughput of all ranks at the median step time.
        mfu: fraction of the device's vendor peak; None if the peak is unknown.
        peak_device_bytes, peak_host_bytes: peaks of the rank with the largest one.
        split: seconds per step under the keys SPLIT, averaged over ranks; None without traced steps.
        slowest_rank, slowest_host: rank that spent the longest time before its collectives, and its hostname.
        first_loss, last_loss: loss of the first step, and mean loss over the last tenth of the steps.
        run_dir: path relative to the study's folder.
        error: reason for the failure; None if the run succeeded.
    """

    point: FileName
    mode: Mode
    ds_config: str
    nodes: Nodes
    ranks: Ranks
    repeat: Annotated[int, Meta(ge=0, lt=MAX_REPEATS)]
    global_batch: Count
    micro_batch: Count
    accumulation: Count
    run_dir: InnerPath
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    step_times_s: Annotated[tuple[StepSeconds, ...], Meta(max_length=1_000_000)] = ()
    tokens_per_second: Positive | None = None
    mfu: Finite | None = None
    peak_device_bytes: Bytes | None = None
    peak_host_bytes: Bytes | None = None
    split: dict[str, Seconds] | None = None
    slowest_rank: Rank | None = None
    slowest_host: str | None = None
    first_loss: Finite | None = None
    last_loss: Finite | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if self.split is not None and (self.split.keys() != {*SPLIT} or not sum(self.split.values())):
            raise ValueError("the step-time breakdown is incomplete")
        if self.step_times_s and self.error is None and not self.block_size:
            raise ValueError("block_size is missing")

    @property
    def step_tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.global_batch * self.block_size


def points_file(study: Path) -> Path:
    """Return the path of a study's finished repeats."""
    return study / "points.jsonl"


def add_repeat(study: Path, repeat: Repeat) -> None:
    """Append a finished repeat under a lock, since jobs of one study may append concurrently.

    Raises:
        UserError: the file cannot be written.
    """
    path = points_file(study)
    try:
        with locked(study, math.inf):
            append_line(path, as_plain(repeat))
    except OSError as error:
        raise UserError(f"cannot write {path.name}: {error.strerror}", where=str(path), exit_code=1,
                        instead="make the folder writable, then continue; the finished run is kept: "
                                f"ezpz-llm scale --study {study}") from error


def read_repeats(study: Path) -> list[Repeat]:
    """Return the finished repeats in order of completion; for a repeat that was run again, only the last run.

    Raises:
        UserError: a line is not a valid repeat, or there are more repeats than a study can have.
    """
    path = points_file(study)
    repeats: dict[tuple[str, int], Repeat] = {}
    try:
        for line in read_lines(path):
            repeat = as_record(Repeat, line, str(path))
            repeats.pop((repeat.point, repeat.repeat), None)
            repeats[repeat.point, repeat.repeat] = repeat
            if len(repeats) > _MAX_RUNS:
                raise UserError(f"a study has at most {_MAX_RUNS:,} runs", where=str(path))
    except UserError as error:
        raise UserError(f"the line after {len(repeats)} runs is not a run of a study: {error.found}",
                        where=error.where, instead="remove that line") from error
    return list(repeats.values())


@dataclass(frozen=True)
class Provenance:
    """Commands and environment of a point's runs, from run.json.

    Attributes:
        commands: the command as typed, and the launcher command that it started.
        environment: versions, device, hosts and variables.
    """

    commands: tuple[str, ...]
    environment: dict[str, str]


def provenance_of(run_dirs: Sequence[Path]) -> Provenance:
    """Return the provenance of the first run, with the nodes of all runs, omitting missing values."""
    records = [read_record(RunDir(run_dir)) for run_dir in run_dirs]
    record = records[0]
    launch, environment = record.launch or Launch(), record.environment or Environment()
    commands = [shlex.join(command) for command in (launch.typed, launch.argv) if command]
    hosts = [" ".join((record.environment or Environment()).hosts or (record.launch or Launch()).hosts or ())
             for record in records]
    values: dict[str, Any] = {
        **environment.versions,
        "platform": environment.platform,
        "device": " ".join(filter(None, (environment.device.type, environment.device.name))) or None,
        "backend": environment.backend,
        "threads": environment.threads,
        "precision": record.precision,
        "scheduler": launch.scheduler,
        "launcher": " ".join(filter(None, (launch.launcher, launch.dialect))) or None,
        "hosts": ", then ".join(dict.fromkeys(filter(None, hosts))) or None,
        **environment.variables, **(launch.env or {}),
    }
    return Provenance(tuple(commands), {name: str(value) for name, value in values.items() if value is not None})
