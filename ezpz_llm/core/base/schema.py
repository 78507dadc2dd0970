"""Validation of parsed files against classes of fields and type annotations, with limits for numbers in them."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from ezpz_llm.core.base.errors import UserError, nearest_names
from ezpz_llm.core.base.untrusted_input import shorten_value

# Each limit is larger than any existing machine needs, and far below what would exhaust the memory or CPU of a
# login node. Larger numbers are typos or malicious input.
MAX_NODES = 200_000
MAX_RANKS = 2_000_000
MAX_RANKS_PER_NODE = 10_000
"""Maximum number of ranks per node: Linux has 32768 process ids by default, and a rank needs three or more."""
MAX_CORES_PER_NODE = 1_000_000
MAX_HOSTNAME_LENGTH = 255
"""Maximum length of a hostname: DNS allows 253 characters."""
MAX_STEPS = 10**9
MAX_TOKENS = 10**15
MAX_IDS = 2**24
"""Maximum vocabulary size; the largest known is 262,144."""
MAX_REPEATS = 1000
"""Maximum number of runs per point of a study, and of jobs in a chain."""
LAST_SECOND = 253_402_300_799
"""Seconds from 1970 to the end of the year 9999, the last year that datetime supports."""
MAX_SECONDS = 10 * 366 * 86_400


def whole_number(text: str) -> int | None:
    """Parse a non-negative integer of at most 18 ASCII digits without a sign; return None for other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def epoch(text: str) -> float | None:
    """Parse whole seconds since 1970, up to the year 9999; return None for any other text."""
    seconds = whole_number(text)
    return None if seconds is None or seconds > LAST_SECOND else float(seconds)


T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""Maximum absolute value of an integer: the largest signed 64-bit integer."""
KIND_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


class Range(NamedTuple):
    """Inclusive bounds of a number, as in `Annotated[int, Range(1, 100)]`."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{_format_bound(self.least)} to {_format_bound(self.most)}"

    def beyond(self, value: float | None) -> str | None:
        """Return a remedy for a value outside the range, such as "1 or more"; None for a value inside."""
        if value is None or value in self:
            return None
        # For NaN, which compares false, the remedy names the lower bound.
        if value > self.most:
            return f"{_format_bound(self.most)} or less"
        return f"{_format_bound(self.least)} or more"

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.least <= value <= self.most


Epoch = Annotated[float, Range(0, LAST_SECOND)]
"""Seconds since 1970, up to the year 9999."""


def as_dataclass(cls: type[T], value: Any, where: str) -> T:
    """Convert a parsed object to a dataclass, and validate it against the annotations of the fields.

    Supports nested dataclasses and named tuples, `list`, `tuple`, `dict` and `Mapping` (JSON's string keys are
    converted if the annotation is `int`), `Literal`, unions, `Path`, `Any`, and numbers with a `Range`. A float
    field accepts an integer. Fields with a default are optional. With a `TypedDict`, the declared members are
    validated, and other members are kept, since each reader declares only the members that it uses.

    Args:
        value: parsed value, as returned by `ezpz_llm.core.base.untrusted_input`.
        where: name of the file, for the message.

    Raises:
        UserError: a value is invalid. The message names the key, the value, and the expected type.
    """
    return _object(cls, value, where, "")


def as_type(kind: Any, value: Any, where: str, key: str = "") -> Any:
    """Validate a parsed value against an annotation such as `dict[str, list[int]]`. See `as_dataclass`."""
    return _typed(kind, value, where, key)


def _typed(kind: Any, value: Any, where: str, key: str) -> Any:
    if kind is Any or kind is object:
        return value
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        number = _typed(inside[0], value, where, key)
        for bounds in inside[1:]:
            if isinstance(bounds, Range) and number not in bounds:
                raise _invalid_value(key, value, str(bounds), where)
        return number
    if origin in (Union, types.UnionType):
        return _union_member(inside, value, where, key)
    if origin is Literal:
        if any(type(literal) is type(value) and literal == value for literal in inside):
            return value
        raise _invalid_value(key, value, " or ".join(map(repr, inside)), where)
    container = origin or kind
    if container in (list, tuple, Sequence):
        return _sequence(container, inside, value, where, key)
    if container in (dict, Mapping):
        if not isinstance(value, dict):
            raise _invalid_value(key, value, "an object", where)
        key_kind, value_kind = inside or (Any, Any)
        return {_key(key_kind, name, where, key): _typed(value_kind, member, where, key_path(key, name))
                for name, member in value.items()}
    if _has_fields(kind):
        return _object(kind, value, where, key)
    return _scalar(kind, value, where, key)


def _object(cls: Any, value: Any, where: str, key: str) -> Any:
    if not isinstance(value, dict):
        raise _invalid_value(key, value, "an object", where)
    fields, is_open = _fields(cls), is_typeddict(cls)
    for name in value:
        if name not in fields and not is_open:
            near = nearest_names(str(name), fields)
            raise UserError(f"unknown key {shorten_value(key_path(key, name))}", where=where,
                            instead=f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}")
    members = dict(value) if is_open else {}
    for name, (kind, is_required) in fields.items():
        if name in value:
            members[name] = _typed(kind, value[name], where, key_path(key, name))
        elif is_required:
            raise UserError(f"{key_path(key, name)} is missing", where=where)
    return members if is_open else cls(**members)


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return (type, True if required) of each field."""
    kinds = get_type_hints(cls, include_extras=True)
    if is_typeddict(cls):
        return {name: (kind, name in cls.__required_keys__) for name, kind in kinds.items()}
    if _is_named_tuple(cls):
        return {name: (kinds[name], name not in cls._field_defaults) for name in cls._fields}
    from dataclasses import MISSING, fields  # imports much that launch does not need

    return {field.name: (kinds[field.name], field.default is MISSING and field.default_factory is MISSING)
            for field in fields(cls) if field.init}


def _has_fields(kind: Any) -> bool:
    return is_typeddict(kind) or (isinstance(kind, type) and (
        hasattr(kind, "__dataclass_fields__") or _is_named_tuple(kind)))


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _union_member(kinds: Sequence[Any], value: Any, where: str, key: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    candidates = [kind for kind in kinds if kind is not type(None)]
    if len(candidates) == 1:
        return _typed(candidates[0], value, where, key)
    # Try the exact type first, so that 1 stays an int for `float | int`.
    for kind in sorted(candidates, key=lambda kind: type(value) is not kind):
        try:
            return _typed(kind, value, where, key)
        except UserError:
            continue
    raise _invalid_value(key, value, " or ".join(map(_type_name, candidates)), where)


def _sequence(container: Any, inside: Sequence[Any], value: Any, where: str, key: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _invalid_value(key, value, "a list", where)
    if container is tuple and inside and inside[-1] is not Ellipsis:
        if len(value) != len(inside):
            raise _invalid_value(key, value, f"a list of length {len(inside)}", where)
        kinds: Sequence[Any] = inside
    else:
        kinds = [inside[0] if inside else Any] * len(value)
    members = [_typed(kind, member, where, f"{key}[{index}]")
               for index, (kind, member) in enumerate(zip(kinds, value, strict=True))]
    return tuple(members) if container is tuple else members


def _key(kind: Any, name: Any, where: str, key: str) -> Any:
    if kind is int:
        if isinstance(name, str) and name.isdecimal() and name.isascii() and len(name) < 19:
            return int(name)
        raise _invalid_value(key_path(key, name), name, "a whole number as the key", where)
    return _typed(kind, name, where, key)


def _scalar(kind: Any, value: Any, where: str, key: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number and (isinstance(value, float) or abs(value) <= MAX_INTEGER):
        return float(value)
    if kind is int and is_number and isinstance(value, int) and abs(value) <= MAX_INTEGER:
        return value
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if kind in (str, bool, type(None)) and isinstance(value, kind):
        return value
    raise _invalid_value(key, value, _type_name(kind), where)


def _type_name(kind: Any) -> str:
    if kind in KIND_NAMES:
        return KIND_NAMES[kind]
    container = get_origin(kind) or kind
    if container in (list, tuple, Sequence):
        return "a list"
    return "an object" if container in (dict, Mapping) or _has_fields(kind) else str(kind)


def key_path(key: str, name: Any) -> str:
    """Return the path of a member of `key`, shortened for a message."""
    name = shorten_value(name)[1:-1] if isinstance(name, str) else shorten_value(name)
    return f"{key}.{name}" if key else name


def _invalid_value(key: str, value: Any, expected: str, where: str) -> UserError:
    return UserError(f"{key or 'this'} is {format_value(value)}, but must be {expected}", where=where)


def format_value(value: Any) -> str:
    """Return a parsed value as text for a message."""
    if isinstance(value, (bool, type(None))):
        return {None: "null", True: "true", False: "false"}[value]
    is_too_large = isinstance(value, int) and abs(value) > MAX_INTEGER
    return "a number beyond 64 bits" if is_too_large else shorten_value(value)


def _format_bound(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else f"{bound:,}"
