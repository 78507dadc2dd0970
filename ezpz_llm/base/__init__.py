"""Base of every other package: errors, private folders, and reading what comes from outside this process (standard
library only)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from ezpz_llm.base.errors import (
    EXIT_IDLE,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    UserError,
    cleaned,
    end_at_once_when_shown,
    import_package,
    is_one_line,
    nearest,
    require_package,
    run_command,
    show,
    unknown,
    version_text,
)
from ezpz_llm.base.outside import (
    JsonText,
    NoFile,
    ask_command,
    command_line,
    file_in,
    open_regular,
    parse_json,
    parse_toml,
    read_bytes,
    read_commented_json,
    read_json,
    read_text,
    read_yaml,
    shown,
    system_link,
    system_text,
)
from ezpz_llm.base.package_data import (
    cache_dir,
    data_dir,
    entry_points,
    extensions_dir,
    installed,
    tested_range,
    user_path,
)
from ezpz_llm.base.private import (
    SECRET_VARIABLE,
    NotPrivate,
    PrivateFolder,
    derived,
    is_out_of_reach,
    is_own,
    make_private,
    new_secret,
    open_private,
    read_own,
    read_records,
    remove_private,
    run_secret,
)
from ezpz_llm.base.schema import (
    LONGEST_HOST,
    MOST_CORES_ON_A_HOST,
    MOST_HOSTS,
    MOST_IDS,
    MOST_RANKS,
    MOST_RANKS_ON_A_HOST,
    MOST_REPEATS,
    MOST_SECONDS,
    MOST_STEPS,
    MOST_TOKENS,
    Epoch,
    Range,
    as_dataclass,
    as_type,
    epoch,
    whole_number,
)

__all__ = [
    "EXIT_IDLE",
    "EXIT_PREFLIGHT",
    "EXIT_USAGE",
    "LONGEST_HOST",
    "MOST_CORES_ON_A_HOST",
    "MOST_HOSTS",
    "MOST_IDS",
    "MOST_RANKS",
    "MOST_RANKS_ON_A_HOST",
    "MOST_REPEATS",
    "MOST_SECONDS",
    "MOST_STEPS",
    "MOST_TOKENS",
    "SECRET_VARIABLE",
    "Epoch",
    "JsonText",
    "NoFile",
    "NotPrivate",
    "PrivateFolder",
    "Range",
    "UserError",
    "apportioned",
    "as_dataclass",
    "as_type",
    "ask_command",
    "cache_dir",
    "cleaned",
    "command_line",
    "counted",
    "data_dir",
    "derived",
    "end_at_once_when_shown",
    "entry_points",
    "epoch",
    "extensions_dir",
    "file_in",
    "grouped",
    "import_package",
    "installed",
    "is_one_line",
    "is_out_of_reach",
    "is_own",
    "lazy",
    "make_private",
    "nearest",
    "new_secret",
    "open_private",
    "open_regular",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_commented_json",
    "read_json",
    "read_own",
    "read_records",
    "read_text",
    "read_yaml",
    "remove_private",
    "require_package",
    "run_command",
    "run_secret",
    "show",
    "shown",
    "system_link",
    "system_text",
    "tested_range",
    "unknown",
    "user_path",
    "version_text",
    "whole_number",
]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, keys in the order of their first appearance."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def counted(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lazy(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first asked for.

    Args:
        places: the module within the package that has each name.
    """
    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return get


def apportioned(parts: Sequence[float], whole: int) -> list[int]:
    """Whole numbers in proportion to `parts`, by largest remainders: together `whole`."""
    total = sum(parts)
    exact = [part / total * whole for part in parts]
    found = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[:whole - sum(found)]:
        found[i] += 1
    return found
