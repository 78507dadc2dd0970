"""Shared base of all packages: errors, private folders, and parsing of untrusted input (standard library only)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from ezpz_llm.core.base.errors import (
    EXIT_IDLE,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    UserError,
    did_you_mean,
    error_text,
    escape_control_characters,
    exit_after_uncaught_exception,
    import_package,
    is_one_line,
    nearest_names,
    print_lines,
    require_package,
    run_command,
    unknown_name_error,
    version_text,
)
from ezpz_llm.core.base.package_data import (
    Plugin,
    cache_dir,
    data_dir,
    entry_points,
    extensions_dir,
    installed,
    load_plugins,
    tested_range,
    user_path,
)
from ezpz_llm.core.base.private_folders import (
    SECRET_VARIABLE,
    NotPrivate,
    PrivateFolder,
    derive_key,
    is_own,
    is_protected_from_others,
    make_private,
    new_secret,
    open_private,
    read_own,
    read_records,
    remove_private,
    run_secret,
)
from ezpz_llm.core.base.schema import (
    MAX_CORES_PER_NODE,
    MAX_HOSTNAME_LENGTH,
    MAX_IDS,
    MAX_NODES,
    MAX_RANKS,
    MAX_RANKS_PER_NODE,
    MAX_REPEATS,
    MAX_SECONDS,
    MAX_STEPS,
    MAX_TOKENS,
    Epoch,
    Range,
    as_dataclass,
    as_type,
    epoch,
    whole_number,
)
from ezpz_llm.core.base.system_queries import ask_command, command_line, processor_id, system_link, system_text
from ezpz_llm.core.base.untrusted_input import (
    JsonText,
    NoFile,
    join_file_name,
    open_regular,
    parse_json,
    parse_plain_json,
    parse_toml,
    read_bytes,
    read_commented_json,
    read_json,
    read_text,
    read_yaml,
    shorten_value,
)

__all__ = [
    "EXIT_IDLE",
    "EXIT_PREFLIGHT",
    "EXIT_USAGE",
    "MAX_CORES_PER_NODE",
    "MAX_HOSTNAME_LENGTH",
    "MAX_IDS",
    "MAX_NODES",
    "MAX_RANKS",
    "MAX_RANKS_PER_NODE",
    "MAX_REPEATS",
    "MAX_SECONDS",
    "MAX_STEPS",
    "MAX_TOKENS",
    "SECRET_VARIABLE",
    "Epoch",
    "JsonText",
    "NoFile",
    "NotPrivate",
    "Plugin",
    "PrivateFolder",
    "Range",
    "UserError",
    "apportion",
    "as_dataclass",
    "as_type",
    "ask_command",
    "cache_dir",
    "command_line",
    "count_noun",
    "data_dir",
    "derive_key",
    "did_you_mean",
    "entry_points",
    "epoch",
    "error_text",
    "escape_control_characters",
    "exit_after_uncaught_exception",
    "extensions_dir",
    "group_by_key",
    "import_package",
    "installed",
    "is_one_line",
    "is_own",
    "is_protected_from_others",
    "join_file_name",
    "lazy_names",
    "load_plugins",
    "make_private",
    "nearest_names",
    "new_secret",
    "open_private",
    "open_regular",
    "parse_json",
    "parse_plain_json",
    "parse_toml",
    "print_lines", "processor_id",
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
    "shorten_value",
    "system_link",
    "system_text",
    "tested_range",
    "unknown_name_error",
    "user_path",
    "version_text",
    "whole_number",
]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def group_by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, with keys in the order of their first appearance."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def count_noun(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` that imports each name of a package on first access.

    Args:
        places: module of the package that defines each name.
    """
    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return get


def apportion(parts: Sequence[float], whole: int) -> list[int]:
    """Split `whole` into integers in proportion to `parts`, by the largest-remainder method."""
    total = sum(parts)
    exact = [part / total * whole for part in parts]
    shares = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[:whole - sum(shares)]:
        shares[i] += 1
    return shares
