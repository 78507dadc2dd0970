"""A trace's file, read part by part: what is not needed of its events is never in memory all at once."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ezpz_llm.base.outside import first_json, shown
from ezpz_llm.errors import UserError

_MOST_US = 1e18
"""Of a time or a duration; NaN is not below it either."""
MOST_EVENTS = 1_000_000
"""Events with a duration that are kept, about 500 MB."""
MOST_CHARACTERS = 4 << 30
"""Of a whole trace, unpacked."""
_MOST_OF_ONE = 16 << 20
"""Characters of one event, or of another member."""
_PART = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
_KEY = re.compile(r'[\s,{]*("(?:[^"\\]|\\.)*")\s*:\s*|[\s,{]*\}')
_ARGUMENTS = ("correlation", "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Process Group Ranks")
_AGAIN = "trace the run again"
_FEWER = "fewer steps: --trace-steps 5"


def load_trace(path: Path) -> dict[str, Any]:
    """The members of a trace, and of its events those with a duration, by the members that are looked at.

    Raises:
        UserError: it is damaged, holds what no profiler writes, or is beyond the limits.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return _load(_Text(file, str(path)), str(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"the trace cannot be read: {error}", where=str(path), instead=_AGAIN) from error


def _load(text: _Text, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"traceEvents": []}
    while (key := text.key()) is not None:
        if key != "traceEvents":
            found[key] = text.value()
            continue
        for event in text.items():
            if isinstance(event, dict) and event.get("ph") == "X":
                found["traceEvents"].append(_needed(event, where))
                if len(found["traceEvents"]) > MOST_EVENTS:
                    raise UserError(f"this trace has more than {MOST_EVENTS:,} events", where=where, instead=_FEWER)
    return found


def _needed(event: dict[str, Any], where: str) -> dict[str, Any]:
    kept = {name: event.get(name) for name in ("name", "ts", "dur", "tid", "cat")}
    for name, kinds in (("name", str), ("ts", (int, float)), ("dur", (int, float)), ("tid", (int, str)),
                        ("cat", (str, type(None)))):
        if not isinstance(kept[name], kinds) or (name in ("ts", "dur") and not abs(kept[name]) < _MOST_US):
            raise UserError(f"{name} of an event is {shown(kept[name])}", where=where, instead=_AGAIN)
    arguments = event.get("args")
    if isinstance(arguments, dict):
        kept["args"] = {name: arguments[name] for name in _ARGUMENTS
                        if isinstance(arguments.get(name), (int, str))}
    kept["ph"] = "X"
    return kept


class _Text:
    """The text of a file, of which one value at a time is held."""

    def __init__(self, file: TextIO, where: str) -> None:
        self._file, self._where = file, where
        self._text, self._at, self._read = "", 0, 0

    def key(self) -> str | None:
        """The name of the object's next member; None at its end."""
        while (found := _KEY.match(self._text, self._at)) is None or found.end() == len(self._text):
            if not self._more():
                if found is None:
                    raise ValueError("it ends before its end")
                break
        self._at = found.end()
        return None if found[1] is None else first_json(found[1], 0)[0]

    def value(self) -> Any:
        """The next value, which ends before the text does."""
        while True:
            try:
                value, end = first_json(self._text, self._at)
                if end < len(self._text):
                    self._at = end
                    return value
            except ValueError:
                if len(self._text) - self._at > _MOST_OF_ONE:
                    raise
            if not self._more():
                raise ValueError("it ends before its end")

    def items(self) -> Iterator[Any]:
        """The values of the list that comes next."""
        if self._next() != "[":
            raise ValueError("its events are no list")
        self._at += 1
        while self._next() != "]":
            yield self.value()
        self._at += 1

    def _next(self) -> str:
        while (found := _BETWEEN.match(self._text, self._at)).end() == len(self._text):
            if not self._more():
                raise ValueError("it ends before its end")
        self._at = found.end()
        return self._text[self._at]

    def _more(self) -> bool:
        part = self._file.read(_PART)
        self._read += len(part)
        if self._read > MOST_CHARACTERS:
            raise UserError(f"this trace is larger than {MOST_CHARACTERS >> 30} GiB, unpacked", where=self._where,
                            instead=_FEWER)
        self._text, self._at = self._text[self._at:] + part, 0
        return bool(part)
