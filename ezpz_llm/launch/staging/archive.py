"""One file that holds an environment, made once for as long as nothing in the environment changes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.launch.staging.roots import Root

MANIFEST = "staging.json"
"""The archive's first member: where its folders came from, and which of its files name them."""

_KEPT = 4
_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Archive:
    """`files` and `bytes` count what is in it; `is_new` is true where it was made just now."""

    path: Path
    files: int
    bytes: int
    is_new: bool


def make_archives(roots: Sequence[Root], folder: Path) -> tuple[Archive, ...]:
    """The archives of `roots`, found in `folder` or made there: one of the environment, and one of the source code,
    which changes more often, so that the large one stays.

    Raises:
        UserError: a file cannot be read, or the archive not be written.
    """
    parts = [tuple(root for root in roots if root.changes_often is often) for often in (False, True)]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        archives = tuple(_archive(part, roots, folder) for part in parts if part)
        _remove_old(folder, archives)
    except OSError as error:
        raise UserError(f"cannot archive the environment: {error.strerror}", exit_code=1,
                        where=error.filename or str(folder), instead="another cache (EZPZ_LLM_CACHE)") from error
    return archives


def _archive(part: Sequence[Root], roots: Sequence[Root], folder: Path) -> Archive:
    digest, files, size = _fingerprint(part, roots)
    path = folder / f"{digest}.tar"
    if path.exists():
        os.utime(path)
        return Archive(path, files, size, False)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{digest}.")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            _fill(tar, part, roots)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return Archive(path, files, size, True)


def _fingerprint(part: Sequence[Root], roots: Sequence[Root]) -> tuple[str, int, int]:
    """By names, sizes and times of change, not by contents: reading them is what this is meant to avoid."""
    digest = hashlib.sha256(repr([(str(root.path), root.name) for root in roots]).encode())
    files = size = 0
    for root in part:
        for name, status in root.entries():
            digest.update(f"{root.name}/{name}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
            if stat.S_ISREG(status.st_mode):
                files, size = files + 1, size + status.st_size
    return digest.hexdigest()[:24], files, size


def _fill(tar: tarfile.TarFile, part: Sequence[Root], roots: Sequence[Root]) -> None:
    names = [(root, name) for root in part for name, _ in root.entries()]
    manifest = {"roots": {str(root.path): root.name for root in roots},
                "rewrite": [f"{root.name}/{name}" for root, name in names if _names_folders(root.path / name)]}
    data = json.dumps(manifest).encode()
    member = tarfile.TarInfo(MANIFEST)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))
    for root, name in names:
        path = root.path / name
        member = tar.gettarinfo(path, f"{root.name}/{name}")
        if member is None:
            # A socket, or another thing that no archive holds.
            continue
        if member.issym():
            member.linkname = _link_target(path, root.path)
        if member.isreg():
            with path.open("rb") as file:
                tar.addfile(member, file)
        else:
            tar.addfile(member)


def _link_target(path: Path, root: Path) -> str:
    """Where a link leads: as it is inside its root; absolute where it leaves it, since roots move apart."""
    target = os.readlink(path)
    full = os.path.normpath(path.parent / target)
    return target if full.startswith(f"{root}{os.sep}") else full


def _names_folders(path: Path) -> bool:
    """Is this one of the files in which an environment says where it is?"""
    if path.is_symlink() or not path.is_file():
        return False
    if path.parent.name == "bin":
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!" or path.name.lower().startswith("activate")
        return is_script and path.stat().st_size < _TEXT_BYTES
    return path.name == "pyvenv.cfg" or path.suffix == ".pth" or (
        path.name.startswith("__editable__") and path.suffix == ".py")


def _remove_old(folder: Path, archives: Sequence[Archive]) -> None:
    found = sorted(folder.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[_KEPT:]:
        if path not in [archive.path for archive in archives]:
            path.unlink()
