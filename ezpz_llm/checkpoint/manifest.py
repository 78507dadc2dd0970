"""Checkpoint folders: names, publishing, and the manifest of sizes and hashes (imports no torch).

A folder with a manifest is complete: everything is written as `.step-….partial`, the manifest last, then renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ezpz_llm.base import MOST_STEPS, Range, UserError, as_type, file_in, outside, system_text
from ezpz_llm.rundir import hash_file, sweep_checkpoints, write_atomic, write_json

MANIFEST, INDEX, STATE, LATEST = "manifest.json", "index.json", "state.json", "latest"

_NAME = re.compile(r"step-(\d{8,})")
_LONGEST_NAME = 256


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """The name of the file with a rank's part of the state."""
    return f"rank-{rank:05d}.safetensors"


def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(re.findall(r"step-(\d+)", folder.name)[0])


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints/` folder, by step."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` names, whether or not it is there; None where it names none."""
    pointer = checkpoints / LATEST
    name = system_text(pointer, most=_LONGEST_NAME).strip()
    return checkpoints / name if _NAME.fullmatch(name) else None


def start_partial(checkpoints: Path, step: int) -> Path:
    """A new empty folder to write into; what killed runs left half written in `checkpoints` is removed."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    sweep_checkpoints(checkpoints)
    partial = checkpoints / f".{folder_name(step)}.partial"
    partial.mkdir()
    return partial


def publish(partial: Path, step: int) -> Path:
    """Give a written folder its final name and let `latest` name it.

    A checkpoint of the same step is replaced. `latest` never names a folder that is not there: should the replaced
    one be the latest, the one before it is named, or none, until the new one stands.
    """
    checkpoints = partial.parent
    final = checkpoints / folder_name(step)
    pointer = checkpoints / LATEST
    _flush(partial)
    if final.exists():
        if latest(checkpoints) == final:
            before = [path for path in complete(checkpoints) if step_of(path) < step]
            if before:
                write_atomic(pointer, before[-1].name + "\n")
            else:
                pointer.unlink()
        aside = checkpoints / f".{final.name}.replaced"
        # Left by a kill after its successor stood.
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    _flush(checkpoints)
    write_atomic(pointer, final.name + "\n")
    for replaced in checkpoints.glob(".step-*.replaced"):
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def _flush(folder: Path) -> None:
    """Let the names in a folder reach the disk: the folder before `latest`, even if the power goes."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The manifest: what each of the files must be, and whether it is.
FORMAT = 1
"""Rises when a reader of the older number would misread the files."""
_MOST_BYTES = 1 << 30
"""An index names every piece of every parameter: 100 bytes each, of thousands of ranks."""


class Damaged(UserError):
    """A checkpoint that is not what was saved; another one may be whole."""


@dataclass(frozen=True)
class FileRecord:
    """Manifest entry of a file: its size in bytes and its sha256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class _Entry:
    size: int
    sha256: str


class _Step(TypedDict):
    step: Annotated[int, Range(0, MOST_STEPS)]


class State(_Step, total=False):
    """state.json: the step is always there, the rest after a training run."""

    model: dict[str, Any]
    seed: int
    data: str | None
    consumed: int
    sample_hash: str
    world_size: int
    optimizer_step: int
    loss_scale: dict[str, Any] | None
    tokenizer: dict[str, Any] | None


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json.

    Raises:
        Damaged: it is missing, or holds other types.
    """
    try:
        return as_type(State, read_json(folder / STATE), STATE)
    except Damaged:
        raise
    except UserError as error:
        raise damaged(folder, f"in {STATE}, {error.found}") from error


def read_manifest(folder: Path) -> list[FileRecord]:
    """The files of a checkpoint.

    Raises:
        Damaged: the manifest is not one.
        UserError: it is of a later format than this version knows.
    """
    manifest = read_json(folder / MANIFEST)
    found = manifest.get("format")
    if isinstance(found, int) and FORMAT < found < 100 * FORMAT:
        raise UserError(f"the checkpoint has format {found}, this version reads {FORMAT}", where=str(folder),
                        instead="the version that saved it, or a later one")
    try:
        files = as_type(dict[str, _Entry], manifest.get("files"), MANIFEST, "files")
        records = [FileRecord(file_in(folder, name, MANIFEST).name, entry.size, entry.sha256)
                   for name, entry in files.items()]
    except UserError as error:
        raise damaged(folder, f"in {MANIFEST}, {error.found}") from error
    if found != FORMAT or not records:
        raise damaged(folder, f"{MANIFEST} is of format {found!r} and names {len(records)} files")
    return records


def write_manifest(folder: Path, step: int, records: Iterable[FileRecord]) -> None:
    """Write the manifest, which makes the folder complete once it has its final name."""
    files = {record.name: {"size": record.size, "sha256": record.sha256} for record in records}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        value = outside.read_json(path, _MOST_BYTES)
    except outside.NoFile as error:
        what = f"{path.name} is missing" if path.parent.is_dir() else "the folder is not there"
        raise damaged(path.parent, what) from error
    except UserError as error:
        raise damaged(path.parent, f"{path.name} cannot be read: {error.found}") from error
    if not isinstance(value, dict):
        raise damaged(path.parent, f"{path.name} is not a JSON object")
    return value


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Compare files with what the manifest says of them.

    Raises:
        UserError: a file is missing or has another size or hash; names the file and both values.
    """
    for record in records:
        check_size(folder, record)
        try:
            found = hash_file(folder / record.name)
        except (OSError, UserError) as error:
            why = error.found if isinstance(error, UserError) else error.strerror
            raise damaged(folder, f"{record.name} cannot be read: {why}") from error
        if found != record.sha256:
            raise damaged(folder, f"{record.name} has sha256 {found}, the manifest expects {record.sha256}")


def describe(path: Path) -> FileRecord:
    """The manifest's record of a file as it lies on the disk."""
    return FileRecord(path.name, path.stat().st_size, hash_file(path))


def check_size(folder: Path, record: FileRecord) -> None:
    """Raise `Damaged` where a file is missing, or has another size than the manifest says."""
    try:
        size = (folder / record.name).stat().st_size
    except FileNotFoundError:
        raise damaged(folder, f"{record.name} is missing") from None
    if size != record.size:
        raise damaged(folder, f"{record.name} has {size} bytes, the manifest expects {record.size}")


def damaged(folder: Path, what: str) -> Damaged:
    """The error for a checkpoint in which something is wrong."""
    others = [path for path in complete(folder.parent) if path.name != folder.name]
    return Damaged(f"the checkpoint is damaged: {what}", where=str(folder),
                     instead=f"--resume {others[-1]}" if others else None)


def none_whole(found: Sequence[Damaged]) -> Damaged:
    """The error where each checkpoint that was tried, newest first, is damaged: none of them is suggested."""
    if len(found) == 1:
        return found[0]
    names = ", ".join(Path(str(damage.where)).name for damage in found)
    return Damaged(f"all {len(found)} checkpoints are damaged ({names}); of the newest: {found[0].found}",
                   where=str(Path(str(found[0].where)).parent),
                   instead="copy a whole step-… folder back from elsewhere, or begin again in another --run-dir")
