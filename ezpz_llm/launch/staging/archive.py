"""Archive of a Python environment, made from the folders that its imports come from, anew only if one changed."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

from ezpz_llm.base import UserError

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
        # What no archive holds, such as a socket, is passed over.
        tar.add(root.path / name, f"{root.name}/{name}", recursive=False, filter=partial(_led, root, name))


def _led(root: Root, name: str, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Where a link leads: as it is inside its root; absolute where it leaves it, since roots move apart."""
    if member.issym():
        full = os.path.normpath((root.path / name).parent / member.linkname)
        member.linkname = member.linkname if full.startswith(f"{root.path}{os.sep}") else full
    return member


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
            path.with_suffix(".sqsh").unlink(missing_ok=True)


# What the running Python environment is made of: the folders that its imports come from.
# Part of the operating system, and so of every host.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
_SITE_FOLDERS = ("site-packages", "dist-packages")
_NOT_RUN = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages")
_OUR_DATA = ("ds_configs", "launchers", "jobs")
_MAPPING = re.compile(r"^MAPPING\b[^=]*= *(\{.*\})$", re.MULTILINE)


@dataclass(frozen=True)
class Root:
    """A folder to be copied.

    `name` is the copy's folder; of `path` only the entries `take` go along ("." for all), without those of `skip`;
    both are relative to it. `changes_often` is true of source code that is being worked on.
    """

    path: Path
    name: str
    take: tuple[str, ...] = (".",)
    skip: frozenset[str] = frozenset()
    changes_often: bool = False

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Relative path and status of everything that goes along, folders before what is in them, sorted.

        Raises:
            OSError: something cannot be read.
        """
        for taken in self.take:
            start = self.path / taken
            if taken != ".":
                yield taken, start.lstat()
            if start.is_dir() and not start.is_symlink():
                yield from self._below(start)

    def _below(self, folder: Path) -> Iterator[tuple[str, os.stat_result]]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            relative = os.path.relpath(entry.path, self.path)
            if relative in self.skip or entry.name == ".git":
                continue
            yield relative, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from self._below(Path(entry.path))


def find_roots() -> tuple[Root, ...]:
    """The environment of this process: its prefix, the Python below it, and every other folder it imports from.

    What lies under /usr is left out: it is on every host already.

    Raises:
        UserError: there is nothing to copy.
    """
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    roots = []
    if not _is_system(prefix):
        # A conda base keeps other environments and its downloads inside.
        skip = ("envs", "pkgs") if (prefix / "conda-meta").is_dir() else ()
        roots.append(Root(prefix, "env", skip=frozenset(skip)))
    if base != prefix and not _is_system(base):
        roots.append(_interpreter(base))
    for number, path in enumerate(_other_paths(prefix)):
        is_site = path.name in _SITE_FOLDERS
        # A package of its own, which an editable install's finder points to, or a folder that holds some.
        take = (".",) if is_site or (path / "__init__.py").is_file() else _importable(path)
        roots.append(Root(path, f"path{number}", take, changes_often=not is_site))
    if not roots:
        raise UserError(f"Python and its packages are all under {prefix}, which every host has itself",
                        where="--stage-env", instead="leave --stage-env out")
    return tuple(roots)


def _is_system(path: Path) -> bool:
    return str(path).startswith(tuple(f"{folder}/" for folder in _SYSTEM)) or str(path) in _SYSTEM


def _interpreter(base: Path) -> Root:
    """The Python that a virtual environment was made from, without its own packages."""
    library = os.path.relpath(sysconfig.get_path("stdlib"), base)
    programs = sorted(f"bin/{path.name}" for path in (base / "bin").glob("python*"))
    shared = sorted(f"lib/{path.name}" for path in (base / "lib").glob("*.so*"))
    skip = [f"{library}/{name}" for name in _NOT_RUN]
    skip += [os.path.relpath(path, base) for path in (base / library).glob("config-*")]
    return Root(base, "python", (*programs, *shared, library), frozenset(skip))


def _other_paths(prefix: Path) -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    covered = (prefix, library / "lib-dynload")
    # The first entry is the folder of the command that runs, or the working directory.
    found = [Path(entry) for entry in sys.path[1:] if os.path.isdir(entry)]
    for folder in [Path(entry) for entry in sys.path if Path(entry).name in _SITE_FOLDERS]:
        found += _pointed_to(folder)
    others: list[Path] = []
    for path in found:
        is_covered = path == library or any(path.is_relative_to(folder) for folder in covered)
        if not is_covered and not _is_system(path) and path not in others:
            others.append(path)
    return others


def _pointed_to(site: Path) -> Iterator[Path]:
    """Packages that setuptools' editable installs find by a table in a module of their own."""
    for finder in sorted(site.glob("__editable__*.py")):
        if match := _MAPPING.search(finder.read_text()):
            yield from (Path(path) for path in ast.literal_eval(match[1]).values() if os.path.isdir(path))


def _importable(folder: Path) -> tuple[str, ...]:
    """The modules and packages in a source folder, and our own data beside them; not what else a checkout holds."""
    data = _OUR_DATA if (folder / "ezpz_llm").is_dir() else ()
    return tuple(entry.name for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
                 if entry.name in data
                 or (entry.is_file() and entry.name.endswith((".py", ".so")))
                 or os.path.isfile(os.path.join(entry.path, "__init__.py")))
