"""What every other room may rest on: private folders, and reading what comes from outside this process (standard
library only)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, keys in the order of their first appearance."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


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
