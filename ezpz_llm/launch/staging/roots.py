"""What the running Python environment is made of: the folders that its imports come from."""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.errors import UserError

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
