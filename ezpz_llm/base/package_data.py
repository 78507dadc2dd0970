"""Data files of the project, the one cache outside the run directory, and other packages: versions, entry points.

Data files (`ds_configs/`, `launchers/`, `jobs/`) lie at the repository root in an editable install and under
`ezpz_llm/_data` in a wheel. The cache holds the virtual environment, token shards, tokenizer files,
DeepSpeed's built ops and what scripts under launch compile; nothing else is written outside a run directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError, cleaned
from ezpz_llm.base.outside import system_text

_PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """The folder `name` (such as "ds_configs") among the project's data files."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def user_path(text: str | Path) -> Path:
    """A path that the user named, with `~` as a shell would read it.

    Raises:
        UserError: it has control characters, there is no such user, or this one has no home directory.
    """
    if any(character < " " or "\x7f" <= character < "\xa0" for character in str(text)):
        # Messages and listings name it: a terminal would obey it.
        raise UserError(f"{str(text)!r} has control characters", instead="a path without them")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{str(text)!r} begins with no home directory that is known here",
                        instead="the whole path") from error


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """The documented cache: $EZPZ_LLM_CACHE, else $XDG_CACHE_HOME/ezpz_llm, else ~/.cache/ezpz_llm.

    Raises:
        UserError: this user has no home directory.
    """
    env = os.environ if env is None else env
    if chosen := env.get("EZPZ_LLM_CACHE"):
        return user_path(chosen)
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else user_path("~/.cache")) / "ezpz_llm"


def extensions_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which torch extensions of launched scripts are compiled, per Python environment.

    Raises:
        UserError: this user has no home directory.
    """
    return cache_dir(env).absolute() / "torch_extensions"


def entry_points(group: str, wrong: Callable[[Any], str | None]) -> list[Any]:
    """Import the entry points of installed packages in `group`. One that cannot be imported or used is skipped
    with a warning: most commands do not need it.

    Args:
        wrong: why an entry point cannot be used; None where it can.
    """
    # importlib.metadata takes 40 ms to import and to look through an environment, a plan 150 ms in all.
    if not any(f"[{group}]" in system_text(path) for folder in sys.path
               for path in Path(folder or os.curdir).glob("*-info/entry_points.txt")):
        return []
    found = []
    for point in import_module("importlib.metadata").entry_points(group=group):
        try:
            value = point.load()
            why = wrong(value)
        except (Exception, SystemExit) as error:  # whatever is wrong with another package
            why = f"{type(error).__name__}: {error}"
        if why is None:
            found.append(value)
        else:
            print(cleaned(f"warning: {point.name} = {point.value} ({group}) is left out: {why}"), file=sys.stderr,
                  flush=True)
    return found


def installed(package: str) -> str | None:
    """The version of an installed package; None without it."""
    metadata = import_module("importlib.metadata")
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tested_range(package: str) -> str:
    """Return the requirement for a package in the metadata of the installed ezpz_llm; the name alone without it."""
    metadata = import_module("importlib.metadata")
    try:
        requirements = metadata.requires("ezpz_llm") or ()
    except metadata.PackageNotFoundError:
        requirements = ()
    return next((text for text in requirements if text.startswith(package)), package)
