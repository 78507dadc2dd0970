"""Checkpoint folders: their names, their manifest, finding one, checking one, publishing one (no torch).

A folder with a manifest is complete: everything is written as `.step-….partial`, the manifest last, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError, nearest
from ezpz_llm.rundir import RunDir, write_atomic, write_json

FORMAT = 1
"""Rises when a reader of the older number would misread the files."""
MANIFEST, INDEX, STATE, LATEST = "manifest.json", "index.json", "state.json", "latest"

_NAME = re.compile(r"step-(\d{8,})")


class Damaged(UserError):
    """A checkpoint that is not what was saved; another one may be whole."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes and its sha256."""

    name: str
    size: int
    sha256: str


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints/` folder, by step."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def find(where: str | Path) -> Path:
    """The checkpoint that `where` means: a checkpoint's own folder, or the newest whole one of a run directory.

    Sizes are compared with the manifest; hashes only when the checkpoint is loaded.

    Raises:
        UserError: there is none at that place, or only ones with a file missing or cut short.
    """
    first: Damaged | None = None
    for folder in candidates(where):
        try:
            for record in read_manifest(folder):
                _check_size(folder, record)
        except Damaged as damage:
            first = first or damage
        else:
            return folder
    raise first or _none(Path(where))


def candidates(where: str | Path) -> list[Path]:
    """What `where` may mean, best first: a checkpoint's own folder and nothing else, or those of a run directory.

    Of a run these are the one that `latest` names, even if it is not there, and then all before it; later ones are
    of a continuation that was abandoned. At least one.

    Raises:
        UserError: there is nothing at that place.
    """
    path = Path(where)
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.with_name(name)) for name in nearest(path.name, siblings)]
        raise UserError(f"no run directory or checkpoint at {path}", where="--resume",
                        instead=f"did you mean {' or '.join(near)}?" if near else None)
    if (path / MANIFEST).is_file():
        return [path]
    checkpoints = path if path.name == "checkpoints" else RunDir(path).checkpoints
    newest = latest(checkpoints)
    found = [folder for folder in [*complete(checkpoints), *_put_aside(checkpoints)]
             if newest is None or step_of(folder) < step_of(newest)]
    found = [*([newest] if newest else []), *sorted(found, key=step_of, reverse=True)]
    if not found:
        raise _none(path)
    return found


def _none(path: Path) -> UserError:
    return UserError(f"no complete checkpoint in {path}", where="--resume",
                     instead="name a run directory or a checkpoints/step-… folder in one")


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` names, whether or not it is there; None where it names none."""
    pointer = checkpoints / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return checkpoints / name if _NAME.fullmatch(name) else None


def _put_aside(checkpoints: Path) -> list[Path]:
    """Checkpoints that were about to be replaced when the run was killed (see `publish`)."""
    return [path for path in checkpoints.glob(".step-*.replaced")
            if (path / MANIFEST).is_file() and not (checkpoints / folder_name(step_of(path))).exists()]


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
        records = [FileRecord(name, entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{MANIFEST} lacks {error}") from error
    if found != FORMAT or not records:
        raise damaged(folder, f"{MANIFEST} is of format {found!r} and names {len(records)} files")
    return records


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        what = f"{path.name} is missing" if path.parent.is_dir() else "the folder is not there"
        raise damaged(path.parent, what) from error
    except (OSError, ValueError) as error:
        raise damaged(path.parent, f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise damaged(path.parent, f"{path.name} is not a JSON object")
    return value


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Compare files with what the manifest says of them.

    Raises:
        UserError: a file is missing or has another size or hash; names the file and both values.
    """
    for record in records:
        _check_size(folder, record)
        try:
            found = hash_file(folder / record.name)
        except OSError as error:
            raise damaged(folder, f"{record.name} cannot be read: {error.strerror}") from error
        if found != record.sha256:
            raise damaged(folder, f"{record.name} has sha256 {found}, the manifest expects {record.sha256}")


def hash_file(path: Path) -> str:
    """The sha256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _check_size(folder: Path, record: FileRecord) -> None:
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


def write_manifest(folder: Path, step: int, records: Iterable[FileRecord]) -> None:
    """Write the manifest, which makes the folder complete once it has its final name."""
    files = {record.name: {"size": record.size, "sha256": record.sha256} for record in records}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})


def describe(path: Path) -> FileRecord:
    """The manifest's record of a file as it lies on the disk."""
    return FileRecord(path.name, path.stat().st_size, hash_file(path))


def start_partial(checkpoints: Path, step: int) -> Path:
    """A new empty folder to write into; what killed runs left half written in `checkpoints` is removed."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left in [*checkpoints.glob(".step-*.partial"), *checkpoints.glob(".step-*.removed")]:
        shutil.rmtree(left, ignore_errors=True)
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


def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(re.search(r"step-(\d+)", folder.name)[1])
