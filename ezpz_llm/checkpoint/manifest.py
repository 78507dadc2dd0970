"""A checkpoint's manifest: what each of its files must be, and whether it is (no torch)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ezpz_llm.base import outside
from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import file_in
from ezpz_llm.base.schema import MOST_STEPS, Range, as_type
from ezpz_llm.checkpoint.folder import MANIFEST, STATE, complete
from ezpz_llm.rundir import write_json

FORMAT = 1
"""Rises when a reader of the older number would misread the files."""
_MOST_BYTES = 1 << 30
"""An index names every piece of every parameter: 100 bytes each, of thousands of ranks."""


class Damaged(UserError):
    """A checkpoint that is not what was saved; another one may be whole."""



@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes and its sha256."""

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
    """What a checkpoint's state.json holds.

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


def none_whole(found: Sequence[Damaged]) -> Damaged:
    """The error where each checkpoint that was tried, newest first, is damaged: none of them is suggested."""
    if len(found) == 1:
        return found[0]
    names = ", ".join(Path(str(damage.where)).name for damage in found)
    return Damaged(f"all {len(found)} checkpoints are damaged ({names}); of the newest: {found[0].found}",
                   where=str(Path(str(found[0].where)).parent),
                   instead="copy a whole step-… folder back from elsewhere, or begin again in another --run-dir")
