"""A checkpoint's manifest: what each of its files must be, and whether it is (no torch)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.engine.checkpoint.folder import MANIFEST, complete
from ezpz_llm.errors import UserError
from ezpz_llm.rundir import write_json

FORMAT = 1
"""Rises when a reader of the older number would misread the files."""


class Damaged(UserError):
    """A checkpoint that is not what was saved; another one may be whole."""



@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes and its sha256."""

    name: str
    size: int
    sha256: str



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
        check_size(folder, record)
        try:
            found = hash_file(folder / record.name)
        except OSError as error:
            raise damaged(folder, f"{record.name} cannot be read: {error.strerror}") from error
        if found != record.sha256:
            raise damaged(folder, f"{record.name} has sha256 {found}, the manifest expects {record.sha256}")



def describe(path: Path) -> FileRecord:
    """The manifest's record of a file as it lies on the disk."""
    return FileRecord(path.name, path.stat().st_size, hash_file(path))



def hash_file(path: Path) -> str:
    """The sha256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()



def check_size(folder: Path, record: FileRecord) -> None:
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
