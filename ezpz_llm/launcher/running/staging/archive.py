"""Archives of a Python environment, built from the folders on its import path and rebuilt only after changes."""

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

from ezpz_llm.core.base import UserError

MANIFEST = "staging.json"
"""First member of an archive: the source folders, and the files that mention these folders."""

_KEPT = 4
_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Archive:
    """Archive, and the size of its content. `is_new` is False if it was found in the cache."""

    path: Path
    files: int
    bytes: int
    is_new: bool


def make_archives(roots: Sequence[Root], folder: Path) -> tuple[Archive, ...]:
    """Return the archives of `roots` in `folder`; create them if they are missing.

    Source code, which changes more often, has an archive of its own, so that the large one stays valid.

    Raises:
        UserError: a file cannot be read, or the archive cannot be written.
    """
    parts = [tuple(root for root in roots if root.changes_often is often) for often in (False, True)]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        archives = tuple(_archive(members, roots, folder) for members in parts if members)
        _remove_old(folder, archives)
    except OSError as error:
        raise UserError(f"cannot archive the environment: {error.strerror}", exit_code=1,
                        where=error.filename or str(folder),
                        instead="choose another cache directory (EZPZ_LLM_CACHE)") from error
    return archives


def _archive(members: Sequence[Root], roots: Sequence[Root], folder: Path) -> Archive:
    digest, files, size = _fingerprint(members, roots)
    path = folder / f"{digest}.tar"
    if path.exists():
        os.utime(path)
        return Archive(path, files, size, False)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{digest}.")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            _fill(tar, members, roots)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return Archive(path, files, size, True)


def _fingerprint(members: Sequence[Root], roots: Sequence[Root]) -> tuple[str, int, int]:
    """Hash names, sizes and modification times, but not contents, because reading the files is slow."""
    digest = hashlib.sha256(repr([(str(root.path), root.name) for root in roots]).encode())
    files = size = 0
    for root in members:
        for name, status in root.entries():
            digest.update(f"{root.name}/{name}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
            if stat.S_ISREG(status.st_mode):
                files, size = files + 1, size + status.st_size
    return digest.hexdigest()[:24], files, size


def _fill(tar: tarfile.TarFile, members: Sequence[Root], roots: Sequence[Root]) -> None:
    names = [(root, name) for root in members for name, _ in root.entries()]
    manifest = {"roots": {str(root.path): root.name for root in roots},
                "rewrite": [f"{root.name}/{name}" for root, name in names if _contains_own_path(root.path / name)]}
    data = json.dumps(manifest).encode()
    member = tarfile.TarInfo(MANIFEST)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))
    for root, name in names:
        # tarfile skips what an archive cannot hold, such as sockets.
        tar.add(root.path / name, f"{root.name}/{name}", recursive=False, filter=partial(_fix_link, root, name))


def _fix_link(root: Root, name: str, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a symbolic link absolute if it leaves its root, since roots are copied to separate folders."""
    if member.issym():
        full = os.path.normpath((root.path / name).parent / member.linkname)
        member.linkname = member.linkname if full.startswith(f"{root.path}{os.sep}") else full
    return member


def _contains_own_path(path: Path) -> bool:
    """Return True for files that contain the environment's own path."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.parent.name == "bin":
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!" or path.name.lower().startswith("activate")
        return is_script and path.stat().st_size < _TEXT_BYTES
    return path.name == "pyvenv.cfg" or path.suffix == ".pth" or (
        path.name.startswith("__editable__") and path.suffix == ".py")


def _remove_old(folder: Path, archives: Sequence[Archive]) -> None:
    archived = sorted(folder.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in archived[_KEPT:]:
        if path not in [archive.path for archive in archives]:
            path.unlink()
            path.with_suffix(".sqsh").unlink(missing_ok=True)


# Parts of the operating system, which every node has.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
_SITE_FOLDERS = ("site-packages", "dist-packages")
_UNUSED_MODULES = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages")
_OUR_DATA = ("ds_configs", "launchers", "jobs")
_MAPPING = re.compile(r"^MAPPING\b[^=]*= *(\{.*\})$", re.MULTILINE)


@dataclass(frozen=True)
class Root:
    """Folder to be copied.

    Attributes:
        name: the name of the copy.
        take: entries to copy, relative to `path`; "." for all.
        skip: entries to leave out, relative to `path`.
        changes_often: True for source code under development.
    """

    path: Path
    name: str
    take: tuple[str, ...] = (".",)
    skip: frozenset[str] = frozenset()
    changes_often: bool = False

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield relative path and status of everything to be copied, sorted, folders before their contents.

        Raises:
            OSError: an entry cannot be read.
        """
        for entry in self.take:
            start = self.path / entry
            if entry != ".":
                yield entry, start.lstat()
            if start.is_dir() and not start.is_symlink():
                yield from self._walk(start)

    def _walk(self, folder: Path) -> Iterator[tuple[str, os.stat_result]]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            relative = os.path.relpath(entry.path, self.path)
            if relative in self.skip or entry.name == ".git":
                continue
            yield relative, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path))


def find_roots() -> tuple[Root, ...]:
    """Return the folders of this environment: its prefix, its base Python, and other folders on the import path.

    Folders under /usr and the like are left out, because every node has them.

    Raises:
        UserError: there is nothing to copy.
    """
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    roots = []
    if not _is_system(prefix):
        # A conda base contains other environments and downloads.
        skip = ("envs", "pkgs") if (prefix / "conda-meta").is_dir() else ()
        roots.append(Root(prefix, "env", skip=frozenset(skip)))
    if base != prefix and not _is_system(base):
        roots.append(_interpreter_root(base))
    for number, path in enumerate(_other_paths(prefix)):
        is_site = path.name in _SITE_FOLDERS
        # Either a package that an editable install's finder points to, or a folder with packages.
        take = (".",) if is_site or (path / "__init__.py").is_file() else _importable_entries(path)
        roots.append(Root(path, f"path{number}", take, changes_often=not is_site))
    if not roots:
        raise UserError(f"Python and its packages are all under {prefix}, which every node already has",
                        where="--stage-env", instead="leave --stage-env out")
    return tuple(roots)


def _is_system(path: Path) -> bool:
    return str(path).startswith(tuple(f"{folder}/" for folder in _SYSTEM)) or str(path) in _SYSTEM


def _interpreter_root(base: Path) -> Root:
    """Return the base Python of a virtual environment, without its packages."""
    library = os.path.relpath(sysconfig.get_path("stdlib"), base)
    programs = sorted(f"bin/{path.name}" for path in (base / "bin").glob("python*"))
    shared = sorted(f"lib/{path.name}" for path in (base / "lib").glob("*.so*"))
    skip = [f"{library}/{name}" for name in _UNUSED_MODULES]
    skip += [os.path.relpath(path, base) for path in (base / library).glob("config-*")]
    return Root(base, "python", (*programs, *shared, library), frozenset(skip))


def _other_paths(prefix: Path) -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    covered = (prefix, library / "lib-dynload")
    # The first entry is the running command's folder, or the working directory.
    candidates = [Path(entry) for entry in sys.path[1:] if os.path.isdir(entry)]
    for folder in [Path(entry) for entry in sys.path if Path(entry).name in _SITE_FOLDERS]:
        candidates += _editable_packages(folder)
    paths: list[Path] = []
    for path in candidates:
        is_covered = path == library or any(path.is_relative_to(folder) for folder in covered)
        if not is_covered and not _is_system(path) and path not in paths:
            paths.append(path)
    return paths


def _editable_packages(site: Path) -> Iterator[Path]:
    """Yield packages of setuptools' editable installs, which a finder module lists in a table."""
    for finder in sorted(site.glob("__editable__*.py")):
        if match := _MAPPING.search(finder.read_text()):
            yield from (Path(path) for path in ast.literal_eval(match[1]).values() if os.path.isdir(path))


def _importable_entries(folder: Path) -> tuple[str, ...]:
    """Return the modules, packages, and ezpz_llm's data in a source folder, without the rest of a checkout."""
    data = _OUR_DATA if (folder / "ezpz_llm").is_dir() else ()
    return tuple(entry.name for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
                 if entry.name in data
                 or (entry.is_file() and entry.name.endswith((".py", ".so")))
                 or os.path.isfile(os.path.join(entry.path, "__init__.py")))
