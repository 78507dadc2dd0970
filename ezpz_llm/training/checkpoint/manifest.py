"""Checkpoint folders: names, publishing, and the manifest of sizes and hashes (imports no torch).

A folder with a manifest is complete: files are written to `.step-….partial`, the manifest last, and that folder is
renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from ezpz_llm.core.base import UserError, join_file_name, system_text, untrusted_input
from ezpz_llm.core.base.records import Bytes, Step, as_plain, as_record
from ezpz_llm.core.rundir import hash_file, remove_incomplete_checkpoints, write_atomic, write_json

MANIFEST, INDEX, STATE, LATEST = "manifest.json", "index.json", "state.json", "latest"

_NAME = re.compile(r"step-(\d{8,})")
_LONGEST_NAME = 256


def folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(re.findall(r"step-(\d+)", folder.name)[0])


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints in a run's `checkpoints/` folder, by step."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir()
               if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(folders, key=step_of)


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the checkpoint that the file `latest` names, even if it does not exist; None for an invalid name."""
    pointer = checkpoints / LATEST
    name = system_text(pointer, most=_LONGEST_NAME).strip()
    return checkpoints / name if _NAME.fullmatch(name) else None


def point_latest(folder: Path) -> None:
    """Let `latest` name a checkpoint of its run, unless the folder has another name, as while it is replaced."""
    if _NAME.fullmatch(folder.name) and latest_checkpoint(folder.parent) != folder:
        write_atomic(folder.parent / LATEST, folder.name + "\n")


def start_partial(checkpoints: Path, step: int) -> Path:
    """Create an empty folder to write into, and remove incomplete checkpoints of killed runs."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_incomplete_checkpoints(checkpoints)
    partial = checkpoints / f".{folder_name(step)}.partial"
    partial.mkdir()
    return partial


def publish(partial: Path, step: int) -> Path:
    """Rename a complete folder to its final name and update `latest`.

    A checkpoint of the same step is replaced. `latest` never names a missing folder: while the latest checkpoint is
    replaced, it names the previous checkpoint, or does not exist if there is none.
    """
    checkpoints = partial.parent
    final = checkpoints / folder_name(step)
    pointer = checkpoints / LATEST
    _flush(partial)
    if final.exists():
        if latest_checkpoint(checkpoints) == final:
            before = [path for path in complete_checkpoints(checkpoints) if step_of(path) < step]
            if before:
                write_atomic(pointer, before[-1].name + "\n")
            else:
                pointer.unlink()
        aside = checkpoints / f".{final.name}.replaced"
        # The process of an earlier replacement may have been killed before it removed this folder.
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    _flush(checkpoints)
    write_atomic(pointer, final.name + "\n")
    for replaced in checkpoints.glob(".step-*.replaced"):
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def _flush(folder: Path) -> None:
    """Flush a folder's entries to disk, so that after a power failure `latest` never names a missing folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


FORMAT = 1
"""Version of the file format; increased when older readers would misread the files."""
_MAX_BYTES = 256 << 20
"""Size limit of a JSON file; the index takes about 100 bytes per piece of a parameter, for thousands of ranks."""


class DamagedCheckpointError(UserError):
    """Error for a damaged checkpoint; another checkpoint of the run may be intact."""


@dataclass(frozen=True)
class FileRecord:
    """File of a checkpoint: its name, its size in bytes and its sha256."""

    name: str
    size: int
    sha256: str


class _Entry(Struct, frozen=True):
    size: Bytes
    sha256: str


class _Manifest(Struct, frozen=True):
    format: int
    step: Step
    files: dict[str, _Entry]


def read_manifest(folder: Path) -> list[FileRecord]:
    """Return the records of a checkpoint's files.

    Raises:
        DamagedCheckpointError: the manifest is missing or invalid.
        UserError: its format is newer than this version supports.
    """
    manifest = read_json(folder / MANIFEST)
    stored_format = manifest.get("format")
    if isinstance(stored_format, int) and FORMAT < stored_format < 100 * FORMAT:
        raise UserError(f"the checkpoint has format {stored_format}, this version reads {FORMAT}",
                        where=str(folder), instead="the version that saved it, or a later one")
    if stored_format != FORMAT:
        raise damaged_error(folder, f"{MANIFEST} has format {stored_format!r}")
    try:
        files = as_record(_Manifest, manifest, MANIFEST).files
        records = [FileRecord(join_file_name(folder, name, MANIFEST).name, entry.size, entry.sha256)
                   for name, entry in files.items()]
    except UserError as error:
        raise damaged_error(folder, f"in {MANIFEST}, {error.found}") from error
    if not records:
        raise damaged_error(folder, f"{MANIFEST} lists no files")
    return records


def write_manifest(folder: Path, step: int, records: Iterable[FileRecord]) -> None:
    """Write the manifest, which marks the folder as complete."""
    files = {record.name: _Entry(record.size, record.sha256) for record in records}
    write_json(folder / MANIFEST, as_plain(_Manifest(FORMAT, step, files)))


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing or invalid.
    """
    try:
        value = untrusted_input.read_json(path, _MAX_BYTES)
    except untrusted_input.NoFile as error:
        problem = f"{path.name} is missing" if path.parent.is_dir() else "the folder does not exist"
        raise damaged_error(path.parent, problem) from error
    except UserError as error:
        raise damaged_error(path.parent, f"{path.name} cannot be read: {error.found}") from error
    if not isinstance(value, dict):
        raise damaged_error(path.parent, f"{path.name} is not a JSON object")
    return value


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Compare files with their manifest records.

    Raises:
        DamagedCheckpointError: a file is missing, or its size or hash differs.
    """
    for record in records:
        check_size(folder, record)
        try:
            sha256 = hash_file(folder / record.name)
        except (OSError, UserError) as error:
            reason = error.found if isinstance(error, UserError) else error.strerror
            raise damaged_error(folder, f"{record.name} cannot be read: {reason}") from error
        if sha256 != record.sha256:
            raise damaged_error(folder, f"{record.name} has sha256 {sha256}, the manifest expects {record.sha256}")


def make_record(path: Path) -> FileRecord:
    """Return the manifest record of a file on disk."""
    return FileRecord(path.name, path.stat().st_size, hash_file(path))


def check_size(folder: Path, record: FileRecord) -> None:
    """Raise `DamagedCheckpointError` if a file is missing or its size differs from the manifest."""
    try:
        size = (folder / record.name).stat().st_size
    except FileNotFoundError:
        raise damaged_error(folder, f"{record.name} is missing") from None
    if size != record.size:
        raise damaged_error(folder, f"{record.name} has {size} bytes, the manifest expects {record.size}")


def damaged_error(folder: Path, problem: str) -> DamagedCheckpointError:
    """Return the error for a damaged checkpoint; the advice names the run's newest other checkpoint, if any."""
    others = [path for path in complete_checkpoints(folder.parent) if path.name != folder.name]
    return DamagedCheckpointError(f"the checkpoint is damaged: {problem}", where=str(folder),
                     instead=f"use {others[-1]}, the run's newest other checkpoint" if others else None)


def all_damaged_error(errors: Sequence[DamagedCheckpointError]) -> DamagedCheckpointError:
    """Return the error for a run whose checkpoints are all damaged. `errors` are ordered newest first."""
    if len(errors) == 1:
        return errors[0]
    names = ", ".join(Path(str(error.where)).name for error in errors)
    return DamagedCheckpointError(
        f"all {len(errors)} checkpoints are damaged ({names}); the newest: {errors[0].found}",
        where=str(Path(str(errors[0].where)).parent),
        instead="restore an intact step-… folder from a backup, or start a new run in another run directory")
