"""Values of a file as typed values, within the limits that numbers of a run have; else one error with the key."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from ezpz_llm.base.errors import UserError, nearest
from ezpz_llm.base.outside import shown

# How large the numbers of a run can be: each limit is beyond all machines that there are, and far below what
# would fill a login node's memory or keep it busy. What is beyond is a slip of the finger, or somebody's
# mischief.
MOST_HOSTS = 200_000
MOST_RANKS = 2_000_000
MOST_RANKS_ON_A_HOST = 10_000
"""A Linux host has 32768 process numbers unless it is told otherwise, and a rank takes three or more."""
MOST_CORES_ON_A_HOST = 1_000_000
LONGEST_HOST = 255
"""Characters of a host's name: DNS has at most 253."""
MOST_STEPS = 10**9
MOST_TOKENS = 10**15
MOST_IDS = 2**24
"""Tokens of a vocabulary; the largest known has 262,144."""
MOST_REPEATS = 1000
"""Runs of one point of a study, and jobs of a chain."""
LAST_SECOND = 253_402_300_799
"""Seconds from 1970 to the year 9999, the last one that datetime supports."""
MOST_SECONDS = 10 * 366 * 86_400


def whole_number(text: str) -> int | None:
    """The whole number that a text is, in the digits 0 to 9 and below 10^18; None where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def epoch(text: str) -> float | None:
    """Whole seconds since 1970, as far as calendars reach; None where it is no such text."""
    seconds = whole_number(text)
    return None if seconds is None or seconds > LAST_SECOND else float(seconds)


T = TypeVar("T")

_LARGEST = 2**63 - 1
"""Largest absolute value of an integer: it fits into 64 bits."""
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Range:
    """The bounds of a number, both included: `Annotated[int, Range(1, 100)]`."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{_short(self.least)} to {_short(self.most)}"

    def beyond(self, value: float | None) -> str | None:
        """Return the advice for a value outside of the range; None for a value inside it, or None."""
        if value is None or value in self:
            return None
        # Also for NaN, which is on no side.
        return f"{_short(self.most)} or less" if value > self.most else f"{_short(self.least)} or more"

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.least <= value <= self.most


Epoch = Annotated[float, Range(0, LAST_SECOND)]
"""Seconds since 1970, as far as calendars reach."""


def as_dataclass(cls: type[T], value: Any, where: str, *, drop_unknown: bool = False) -> T:
    """An object of a file as an instance of the dataclass, whose fields' annotations are the schema.

    Nested dataclasses, `list`, `tuple`, `dict` and `Mapping` (a key of JSON is text, and converted where the
    annotation is `int`), `Literal`, unions, `Path`, `Any`, and numbers with a `Range`. A whole number passes for a
    float. A field with a default may be missing. A `TypedDict` says what some members of an object must be, and
    lets it have others: for records that many readers take their own members from.

    Args:
        value: what a reader of `ezpz_llm.base.outside` returned.
        where: the file, for the message.
        drop_unknown: leave out what is no field (a newer version may have written it), rather than refuse it.

    Raises:
        UserError: naming the key, what it holds, and what it must be.
    """
    return _object(cls, value, where, "", drop_unknown)


def as_type(kind: Any, value: Any, where: str, key: str = "") -> Any:
    """A value of a file as the type of an annotation, such as `dict[str, list[int]]`; see `as_dataclass`."""
    return _typed(kind, value, where, key, False)


def _typed(kind: Any, value: Any, where: str, key: str, drop: bool) -> Any:
    if kind is Any or kind is object:
        return value
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _typed(inside[0], value, where, key, drop)
        for bounds in inside[1:]:
            if isinstance(bounds, Range) and found not in bounds:
                raise _wrong(key, value, str(bounds), where)
        return found
    if origin in (Union, types.UnionType):
        return _one_of(inside, value, where, key, drop)
    if origin is Literal:
        if any(type(one) is type(value) and one == value for one in inside):
            return value
        raise _wrong(key, value, " or ".join(map(repr, inside)), where)
    container = origin or kind
    if container in (list, tuple, Sequence):
        return _sequence(container, inside, value, where, key, drop)
    if container in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(key, value, "an object", where)
        key_kind, kind_of = inside or (Any, Any)
        return {_key(key_kind, name, where, key): _typed(kind_of, member, where, _under(key, name), drop)
                for name, member in value.items()}
    if is_typeddict(kind) or (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return _object(kind, value, where, key, drop)
    return _plain(kind, value, where, key)


def _object(cls: Any, value: Any, where: str, key: str, drop: bool) -> Any:
    if not isinstance(value, dict):
        raise _wrong(key, value, "an object", where)
    fields, is_open = _fields(cls), is_typeddict(cls)
    for name in value:
        if name not in fields and not (drop or is_open):
            near = nearest(str(name), fields)
            raise UserError(f"unknown key {shown(_under(key, name))}", where=where,
                            instead=f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}")
    found = dict(value) if is_open else {}
    for name, (kind, is_required) in fields.items():
        if name in value:
            found[name] = _typed(kind, value[name], where, _under(key, name), drop)
        elif is_required:
            raise UserError(f"{_under(key, name)} is missing", where=where)
    return found if is_open else cls(**found)


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it must be there."""
    kinds, none = get_type_hints(cls, include_extras=True), dataclasses.MISSING
    if is_typeddict(cls):
        return {name: (kind, name in cls.__required_keys__) for name, kind in kinds.items()}
    return {field.name: (kinds[field.name], field.default is none and field.default_factory is none)
            for field in dataclasses.fields(cls) if field.init}


def _one_of(kinds: Sequence[Any], value: Any, where: str, key: str, drop: bool) -> Any:
    if value is None and type(None) in kinds:
        return None
    left = [kind for kind in kinds if kind is not type(None)]
    if len(left) == 1:
        return _typed(left[0], value, where, key, drop)
    # An exact type first: of `int | float`, 1 is an int.
    for kind in sorted(left, key=lambda kind: type(value) is not kind):
        try:
            return _typed(kind, value, where, key, drop)
        except UserError:
            continue
    raise _wrong(key, value, " or ".join(map(_named, left)), where)


def _sequence(container: Any, inside: Sequence[Any], value: Any, where: str, key: str, drop: bool) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong(key, value, "a list", where)
    if container is tuple and inside and inside[-1] is not Ellipsis:
        if len(value) != len(inside):
            raise _wrong(key, value, f"a list of {len(inside)}", where)
        kinds: Sequence[Any] = inside
    else:
        kinds = [inside[0] if inside else Any] * len(value)
    found = [_typed(kind, one, where, f"{key}[{place}]", drop)
             for place, (kind, one) in enumerate(zip(kinds, value, strict=True))]
    return tuple(found) if container is tuple else found


def _key(kind: Any, name: Any, where: str, key: str) -> Any:
    if kind is int:
        if isinstance(name, str) and name.isdecimal() and name.isascii() and len(name) < 19:
            return int(name)
        raise _wrong(_under(key, name), name, "a whole number as the key", where)
    return _typed(kind, name, where, key, False)


def _plain(kind: Any, value: Any, where: str, key: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number and (isinstance(value, float) or abs(value) <= _LARGEST):
        return float(value)
    if kind is int and is_number and isinstance(value, int) and abs(value) <= _LARGEST:
        return value
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if kind in (str, bool, type(None)) and isinstance(value, kind):
        return value
    raise _wrong(key, value, _named(kind), where)


def _named(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    container = get_origin(kind) or kind
    if container in (list, tuple, Sequence):
        return "a list"
    return "an object" if container in (dict, Mapping) or dataclasses.is_dataclass(kind) else str(kind)


def _under(key: str, name: Any) -> str:
    name = shown(name)[1:-1] if isinstance(name, str) else shown(name)
    return f"{key}.{name}" if key else name


def _wrong(key: str, value: Any, expected: str, where: str) -> UserError:
    return UserError(f"{key or 'this'} is {_told(value)}, and must be {expected}", where=where)


def _told(value: Any) -> str:
    if isinstance(value, (bool, type(None))):
        return {None: "null", True: "true", False: "false"}[value]
    return "a number beyond 64 bits" if isinstance(value, int) and abs(value) > _LARGEST else shown(value)


def _short(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else f"{bound:,}"
