"""Conversion of parsed JSON to msgspec structs and dataclasses, and back to plain values.

Not imported by `ezpz_llm.base`: importing msgspec takes 30 ms, and the rank shim and `launch --dry-run` must start
fast.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import LAST_SECOND, MAX_RANKS, MAX_STEPS
from ezpz_llm.base.untrusted_input import shorten_value

T = TypeVar("T")

_MAX_INTEGER = 2**63 - 1

Whole = Annotated[int, msgspec.Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)]
"""Integer of 64 bits. Python reads longer ones from JSON, which would exhaust memory or raise errors later."""
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER)]
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
        return msgspec.convert(value, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise UserError(_describe(str(error), value, key), where=where) from error
    except UnicodeEncodeError:  # a key with a lone surrogate, which JSON allows in the form \ud800
        return as_record(kind, _with_valid_keys(value), where, key)


def as_plain(value: Any) -> Any:
    """Convert structs and dataclasses in `value` to dictionaries, and values that JSON lacks to text."""
    return msgspec.to_builtins(value, enc_hook=_encode, str_keys=True)


def _with_valid_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_valid_keys(member) for member in value]
    if not isinstance(value, dict):
        return value
    return {key.encode(errors="replace").decode(): _with_valid_keys(member) for key, member in value.items()}


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    raise ValueError(f"Expected `str`, got `{type(value).__name__}`")


def _encode(value: Any) -> Any:
    return float(value) if isinstance(value, float) else str(value)  # subclasses of float are numbers of numpy


_PLACE = re.compile(r" - at (?P<of_key>`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_BOUND = re.compile(r"Expected `(?:int|float)` (?P<order>[<>]=) (?P<bound>\S+)$")
_TYPE = re.compile(r"Expected `(?P<types>[^`]+)`(?: of length (?P<length>\d+))?, got .*$")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")
_NAMES = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "null": "null",
          "object": "an object", "array": "a list"}


def _describe(message: str, value: Any, key: str) -> str:
    """Translate a message of msgspec, such as "Expected `int`, got `str` - at `$.launch.world_size`"."""
    place = _PLACE.search(message)
    problem = message[:place.start()] if place else message
    path = place["path"] if place else ""
    name = f"{key}{path}" if key else path.removeprefix(".")
    if missing := _MISSING.match(problem):
        return f"{name}.{missing['name']} is missing" if name else f"{missing['name']} is missing"
    if place and place["of_key"]:
        return f"a key of {name or 'this'} must be {_expected(problem)}"
    found = f"{name or 'this'} is {_format(_find(value, path))}"
    expected = _expected(problem)
    return f"{found}: {problem.lower()}" if expected is None else f"{found}, but must be {expected}"


def _expected(problem: str) -> str | None:
    if bound := _BOUND.match(problem):
        return f"{float(bound['bound']) if '.' in bound['bound'] else int(bound['bound']):,} or " + (
            "more" if bound["order"] == ">=" else "less")
    if kind := _TYPE.match(problem):
        length = f" of length {kind['length']}" if kind["length"] else ""
        return " or ".join(_NAMES.get(name, name) for name in kind["types"].split(" | ")) + length
    return None


_UNKNOWN = object()
_PART = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


def _find(value: Any, path: str) -> Any:
    """Return the value at a path of msgspec, which does not contain the keys of dictionaries."""
    for part in _PART.finditer(path):
        try:
            value = value[part["name"] or int(part["index"])]
        except (KeyError, IndexError, TypeError, ValueError):
            return _UNKNOWN
    return value


def _format(value: Any) -> str:
    if value is _UNKNOWN:
        return "a value of another type"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    is_too_large = isinstance(value, int) and abs(value) > _MAX_INTEGER
    return "a number beyond 64 bits" if is_too_large else shorten_value(value)
