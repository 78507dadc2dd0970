"""A finished run of a study as `points.jsonl` keeps it (standard library only)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.rundir import RunDir, append_line, read_lines, read_record

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
    block_size: int
    step_times_s: tuple[float, ...]
    tokens_per_second: float | None
    mfu: float | None
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    split: dict[str, float] | None
    slowest_rank: int | None
    slowest_host: str | None
    first_loss: float | None
    last_loss: float | None
    run_dir: str
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
    with locked(study, wait=True):
        append_line(points_file(study), asdict(repeat))


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Keep other processes out of `folder` meanwhile, where the file system has locks; false where one has it and
    we were not to wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        got = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            got = False
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                raise
        yield got
    finally:
        os.close(handle)


def read_repeats(study: Path) -> list[Repeat]:
    """The finished repeats in the order in which they finished; of one that was run again, the later.

    Raises:
        UserError: there is no such file, or a line is none of ours.
    """
    path = points_file(study)
    if not path.exists():
        raise UserError("this is not a study, or none of its runs has finished: it has no points.jsonl",
                        where=str(study), instead="the folder that ezpz-llm scale named (runs/scale-…)")
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
    found: dict[str, Any] = {
        **{f"{name}": version for name, version in (environment.get("versions") or {}).items()},
        "platform": environment.get("platform"),
        "device": " ".join(str(device[key]) for key in ("type", "name") if device.get(key)) or None,
        "backend": environment.get("backend"),
        "threads": environment.get("threads"),
        "precision": record.get("precision"),
        "scheduler": launch.get("scheduler"),
        "launcher": " ".join(str(launch[key]) for key in ("launcher", "dialect") if launch.get(key)) or None,
        "hosts": ", then ".join(dict.fromkeys(filter(None, map(_hosts, records)))) or None,
        **{name: value for name, value in {**(environment.get("variables") or {}),
                                           **(launch.get("env") or {})}.items()},
    }
    return Provenance(tuple(commands), {name: str(value) for name, value in found.items() if value is not None})


def _hosts(record: dict[str, Any]) -> str:
    return " ".join((record.get("environment") or {}).get("hosts") or (record.get("launch") or {}).get("hosts")
                    or ())
