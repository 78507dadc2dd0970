"""Data files of the project, the cache, and metadata of installed packages (versions, entry points).

Data files (`ds_configs/`, `launchers/`, `jobs/`) are at the repository root in an editable install and under
`ezpz_llm/_data` in a wheel. The cache holds the virtual environment, token shards, tokenizer files, DeepSpeed's
built ops, and torch extensions that launched scripts compile. Other lasting files are written only to run
directories and to paths that the user names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base.errors import UserError, error_text, is_one_line, print_lines
from ezpz_llm.core.base.system_queries import system_text

_PACKAGE = Path(__file__).resolve().parents[2]


def data_dir(name: str) -> Path:
    """Return the folder `name` of the project's data files, such as "ds_configs"."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def user_path(text: str | Path) -> Path:
    """Return a path given by the user, with `~` expanded as in a shell.

    Raises:
        UserError: the path has control characters, or the home directory is unknown.
    """
    if any(character < " " or "\x7f" <= character < "\xa0" for character in str(text)):
        # Messages and listings print the path, and terminals would interpret the characters.
        raise UserError(f"{str(text)!r} has control characters", instead="a path without them")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{str(text)!r} begins with an unknown home directory",
                        instead="the absolute path") from error


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder: $EZPZ_LLM_CACHE, else $XDG_CACHE_HOME/ezpz_llm, else ~/.cache/ezpz_llm.

    Raises:
        UserError: the home directory is unknown.
    """
    env = os.environ if env is None else env
    if chosen := env.get("EZPZ_LLM_CACHE"):
        return user_path(chosen)
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else user_path("~/.cache")) / "ezpz_llm"


def extensions_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the torch extensions of launched scripts. It has a subfolder per Python environment.

    Raises:
        UserError: the home directory is unknown.
    """
    return cache_dir(env).absolute() / "torch_extensions"


class Plugin(NamedTuple):
    """Loaded entry point: its name, the package that declares it with its version, and the loaded object."""

    name: str
    package: str
    value: Any


def entry_points(group: str, find_problem: Callable[[Any], str | None]) -> list[Any]:
    """Load the entry points of installed packages in `group`, and return their objects; see `load_plugins`."""
    return [plugin.value for plugin in load_plugins(group, lambda plugin: find_problem(plugin.value))]


def load_plugins(group: str, find_problem: Callable[[Plugin], str | None]) -> list[Plugin]:
    """Load and return the entry points of installed packages in `group`.

    Skips an unusable entry point or package with a warning, because most commands do not need it.

    Args:
        find_problem: returns the reason why a loaded entry point cannot be used, or None.
    """
    # Importing importlib.metadata and scanning an environment take 40 ms; launch's entire plan takes 150 ms.
    if not any(f"[{group}]" in system_text(path) for folder in sys.path
               for path in Path(folder or os.curdir).glob("*-info/entry_points.txt")):
        return []
    plugins = []
    for package, point in _declared_entry_points(group):
        try:
            plugin = Plugin(point.name, package, point.load())
            why = find_problem(plugin) if is_one_line(point.name) else "its name has control characters"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any error of a third-party package
            why = error_text(error)
        if why is None:
            plugins.append(plugin)
        else:
            _warn(f"the entry point {point.name} = {point.value} ({group})", why)
    return plugins


def _declared_entry_points(group: str) -> Iterator[tuple[str, Any]]:
    """Yield the entry points in a group, with the name and version of their packages.

    importlib.metadata.entry_points fails as a whole if one package on the path is damaged.
    """
    known = set()
    for package in import_module("importlib.metadata").distributions():
        try:
            name = f"{package.name} {package.version}"
            points = [point for point in package.entry_points if point.group == group]
        except Exception as error:
            _warn(f"the entry points of {getattr(package, '_path', 'a package')}", error_text(error))
            continue
        if package.name not in known:  # later ones on the path are not importable
            known.add(package.name)
            yield from ((" ".join(name.split()), point) for point in points)


def _warn(what: str, why: str) -> None:
    print_lines(f"warning: ignoring {what}: {why}", file=sys.stderr)


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    metadata = import_module("importlib.metadata")
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tested_range(package: str) -> str:
    """Return ezpz_llm's requirement for a package, such as `torch>=2.6`; the name alone if there is none."""
    metadata = import_module("importlib.metadata")
    try:
        requirements = metadata.requires("ezpz_llm") or ()
    except metadata.PackageNotFoundError:
        requirements = ()
    # A requirement of an extra ends in a marker: `torch>=2.6; extra == "train"`.
    return next((text.partition(";")[0].strip() for text in requirements if text.startswith(package)), package)
