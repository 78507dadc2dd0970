"""Conversion of parsed JSON to msgspec structs and dataclasses, and back to plain values.

Not imported by `ezpz_llm.core.base`: importing msgspec takes 30 ms, and the rank shim and `launch --dry-run` must
start fast.
"""

from __future__ import annotations

import functools
import operator
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.schema import (
    KIND_NAMES,
    LAST_SECOND,
    MAX_INTEGER,
    MAX_RANKS,
    MAX_SECONDS,
    MAX_STEPS,
    format_value,
    key_path,
)

T = TypeVar("T")

FileName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f-\x9f]{1,255}\Z")]
"""Name of a file or folder, without directories, so that it cannot refer to another place."""
InnerPath = Annotated[str, msgspec.Meta(
    pattern=r"\A(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\\\x00-\x1f\x7f-\x9f]{1,4095}\Z")]
"""Path below the folder of the file that names it."""
Whole = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""Integer of 64 bits. Python reads longer ones from JSON, which would exhaust memory or raise errors later."""
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Size = Annotated[float, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""Estimated bytes."""
Finite = Annotated[float, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""Number that is neither NaN nor Inf, and whose square is finite."""
Positive = Annotated[float, msgspec.Meta(ge=1e-9, le=MAX_INTEGER)]
"""Number to divide by, such as a measured time or rate."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Epoch = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
"""Seconds since 1970, up to the year 9999."""


def as_record(kind: type[T], value: Any, where: str, key: str = "") -> T:
    """Convert a parsed value to `kind`, a struct, dataclass or annotation. Unknown members are ignored.

    Args:
        where: name of the file, for the message.
        key: path of `value` in the file.

    Raises:
        UserError: a value is invalid. The message names the key, the value, and the expected type.
    """
    try:
        return _convert(kind, value)
    except msgspec.ValidationError as error:
        raise UserError(_describe(kind, value, str(error), key), where=where) from error
    except UnicodeEncodeError:  # text with a lone surrogate, which JSON allows in the form \ud800
        return as_record(kind, _as_valid_text(value), where, key)


def as_plain(value: Any) -> Any:
    """Convert structs and dataclasses in `value` to dictionaries, and values that JSON lacks to text."""
    return msgspec.to_builtins(value, enc_hook=_encode, str_keys=True)


def _convert(kind: type[T], value: Any) -> T:
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode)


def _as_valid_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_as_valid_text(member) for member in value]
    if isinstance(value, dict):
        return {_as_valid_text(key): _as_valid_text(member) for key, member in value.items()}
    return value


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    raise ValueError(f"Expected `str`, got `{type(value).__name__}`")


def _encode(value: Any) -> Any:
    return float(value) if isinstance(value, float) else str(value)  # subclasses of float are numbers of numpy


_PLACE = re.compile(r" - at (?P<of_key>`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_PART = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_BOUND = re.compile(r"Expected `(?:int|float)` (?P<order>[<>]=) (?P<bound>\S+)$")
_LENGTH = re.compile(r"Expected `(?:array|str|object)` of length (?P<order>[<>]=) (?P<length>\d+)$")
_TYPE = re.compile(r"Expected `(?P<types>[^`]+)`(?: of length (?P<length>\d+))?, got .*$")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")
_PATTERN = re.compile(r"Expected `str` matching regex (?P<pattern>.*)$", re.DOTALL)
_PATTERN_NAMES = {repr(get_args(kind)[1].pattern): name for kind, name in (
    (FileName, "a plain file name, without directories"), (InnerPath, "a path in the same folder"))}
_NAMES = {**{kind.__name__: name for kind, name in KIND_NAMES.items()}, "null": "null", "object": "an object",
          "array": "a list"}


def _describe(kind: type, value: Any, message: str, key: str) -> str:
    """Translate a message of msgspec, such as "Expected `int`, got `str` - at `$.launch.world_size`"."""
    place = _PLACE.search(message)
    problem = message[:place.start()] if place else message
    members: list[Any] = []
    for part in _PART.finditer(place["path"] if place else ""):
        if part["name"]:
            members.append(part["name"])
        elif part["index"]:
            members.append(int(part["index"]))
        else:
            members.append(_invalid_key(kind, value, members, message))
            value = _replace(value, members[:-1], {members[-1]: _member(value, members)})
    for member in members:
        key = f"{key}[{member}]" if isinstance(member, int) else key_path(key, member)
    if missing := _MISSING.match(problem):
        return f"{key_path(key, missing['name'])} is missing"
    expected = _expected(problem)
    if place and place["of_key"]:
        return f"a key of {key or 'this'} must be {expected}"
    found = f"{key or 'this'} is {format_value(_member(value, members))}"
    if problem.startswith("Invalid enum value"):
        return f"{found}, which this version does not support"
    return f"{found}: {problem.lower()}" if expected is None else f"{found}, but must be {expected}"


def _expected(problem: str) -> str | None:
    if bound := _BOUND.match(problem):
        number = bound["bound"].removesuffix(".0")
        return (f"{int(number):,}" if number.lstrip("-").isdigit() else number) + (
            " or more" if bound["order"] == ">=" else " or less")
    if limit := _LENGTH.match(problem):
        return f"of length {limit['length']} or {'more' if limit['order'] == '>=' else 'less'}"
    if pattern := _PATTERN.match(problem):
        return _PATTERN_NAMES.get(pattern["pattern"])
    if kind := _TYPE.match(problem):
        length = f" of length {kind['length']}" if kind["length"] else ""
        return " or ".join(_NAMES.get(name, name) for name in kind["types"].split(" | ")) + length
    return None


def _invalid_key(kind: type, value: Any, members: list[Any], message: str) -> Any:
    """Return the key that causes a message, in the dictionary at `members`. msgspec does not name such keys."""
    dictionary = _member(value, members)
    keys = list(dictionary)
    while len(keys) > 1:
        half = keys[:len(keys) // 2]
        try:
            _convert(kind, _replace(value, members, {key: dictionary[key] for key in half}))
            is_in_half = False
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            is_in_half = str(error) == message
        keys = half if is_in_half else keys[len(half):]
    return keys[0]


def _member(value: Any, members: list[Any]) -> Any:
    return functools.reduce(operator.getitem, members, value)


def _replace(value: Any, members: list[Any], new: Any) -> Any:
    if not members:
        return new
    copied = value.copy()
    copied[members[0]] = _replace(value[members[0]], members[1:], new)
    return copied
