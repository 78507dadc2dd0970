"""Mutations of valid inputs: damaged text, values of other types, path traversal, huge sizes."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

WORDS = [
    "",
    "\0",
    "\x1b]0;PWNED\x07",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "ñ²٣",
    "\ud800",
    "%s%n",
    "nan",
    "inf",
    "-1",
    "0",
    "1e309",
    "9" * 5000,
    "x" * 20_000,
    "=",
    ",",
    "[",
    "]",
    "{",
    "}",
    "(x900000000)",
    "[0-9]" * 6,
    "[0-999999999]",
    "--",
    "-",
    "~nobody/x",
    "$(id)",
    "`id`",
    "a=b=c",
    "\n",
    "\r",
    "\u2028",
    "null",
    "true",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    float("nan"),
    float("inf"),
    10**18,
    -(2**63),
    10**25,
    10**400,
    10**4000,
    1e308,
    "",
    "x",
    "\x1b[31m",
    "../../x",
    "/etc/passwd",
    "nan",
    "9" * 5000,
    [],
    [[]],
    {},
    {"": None},
    [1, "x", None, {}],
    {"a": {"b": [1]}},
    [None] * 2000,
]


def text(rng: Random, whole: str) -> str:
    """Return `whole` with one to eight random edits."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(len(whole) + 1)
        end = min(len(whole), at + rng.choice([1, 1, 3, 10, 100]))
        way = rng.randrange(7)
        if way == 0:
            whole = whole[:at] + whole[end:]
        elif way == 1:
            whole = whole[:at] + rng.choice(WORDS) + whole[at:]
        elif way == 2:
            whole = whole[:at] + rng.choice(WORDS) + whole[end:]
        elif way == 3:
            whole = whole[:at] + whole[at:end] * rng.choice([2, 5, 1000]) + whole[end:]
        elif way == 4:
            whole = whole[:at]
        elif way == 5:
            whole = (
                whole[:at]
                + chr(rng.choice([0, 9, 13, 27, 34, 92, 127, 160, 178, 0x661, 0xD800, 0x1F600]))
                + whole[end:]
            )
        else:
            whole = whole[:at] + str(rng.choice([0, -1, 10**9, 10**18, 10**19, 10**30])) + whole[end:]
    return whole[:2_000_000]


def data(rng: Random, whole: str) -> bytes:
    """Return mutated text as bytes, not always valid UTF-8."""
    content = text(rng, whole).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.randbytes(rng.choice([1, 4, 100])) + content[at:]
    return content


def binary(rng: Random, whole: bytes) -> bytes:
    """Return `whole` with integers overwritten, truncated, extended or empty."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(whole) + 1)
        if rng.random() < 0.5:
            at = min(at, rng.randrange(64))  # headers
        size = rng.choice([1, 2, 4, 8])
        way = rng.randrange(6)
        if way < 3:
            number = rng.choice([0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1, rng.getrandbits(64)])
            whole = whole[:at] + (number % 2 ** (8 * size)).to_bytes(size, "little") + whole[at + size:]
        elif way == 3:
            whole = whole[:at]
        elif way == 4:
            whole = whole[:at] + rng.randbytes(rng.choice([1, 3, 100])) + whole[at:]
        else:
            packed = (b"PK\x03\x04" + whole, b"\x80\x04" + whole)  # an archive's and a pickle's first bytes
            whole = rng.choice([b"", whole[:at] + whole[at + size:], whole * 2, *packed])
    return whole


def value(rng: Random, whole: Any) -> Any:
    """Return a copy of an object with members replaced, added or removed."""
    whole = copy.deepcopy(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = _places(whole)
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        way = rng.randrange(6)
        if way < 4:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif way == 4:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice(WORDS)] = copy.deepcopy(rng.choice(VALUES))
        else:
            holder.append(copy.deepcopy(rng.choice(VALUES)))
    return whole


def json_data(rng: Random, whole: Any) -> bytes:
    """Return a JSON file with wrong members, damage, or an extreme size or depth."""
    way = rng.random()
    if way < 0.7:
        return json.dumps(value(rng, whole)).encode()
    if way < 0.9:
        return data(rng, json.dumps(whole))
    deep = rng.choice([90, 500, 990, 5000, 100_000])
    return rng.choice(
        [
            b"",
            b"null",
            b"[]",
            b"3",
            b'"x"',
            b"\xff\xfe",
            b"[" * deep,
            b"[" * deep + b"]" * deep,
            b'{"a":' * deep + b"1" + b"}" * deep,
            b"1" * 5000,
            b"-" + b"9" * 100_000,
            b"{" * 3,
            b" " * 100_000,
            b"\xef\xbb\xbf{}",
            json.dumps(whole).encode("utf-16"),
        ]
    )


def lines(rng: Random, rows: list[Any]) -> bytes:
    """Return a file of JSON lines, some of them hostile."""
    encoded = [json.dumps(row).encode() for row in rows]
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(encoded))
        encoded[at] = json_data(rng, rows[at]).replace(b"\n", b" ")
    return b"\n".join(encoded) + rng.choice([b"\n", b"\n", b""])


def environment(rng: Random, whole: dict[str, str]) -> dict[str, str]:
    """Return variables with values changed or removed; without NUL and lone surrogates, which exec rejects."""
    variables = dict(whole)
    for _ in range(rng.choice([1, 1, 2, 4])):
        name = rng.choice(sorted(whole))
        if rng.random() < 0.15:
            variables.pop(name, None)
        else:
            variables[name] = text(rng, whole[name]).replace("\0", "").replace("\ud800", "?")[:130_000]
    return variables


def words(rng: Random, whole: list[str]) -> list[str]:
    """Return a command line with arguments inserted, changed or removed."""
    arguments = list(whole)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(arguments) + 1)
        way = rng.randrange(4)
        if way == 0:
            arguments.insert(at, rng.choice([*WORDS, *whole]))
        elif way == 1 and at < len(arguments):
            arguments[at] = text(rng, arguments[at])
        elif way == 2 and at < len(arguments):
            del arguments[at]
        elif at < len(arguments):
            arguments[at] = rng.choice(WORDS)
    return [word.replace("\0", "").replace("\ud800", "?")[:130_000] for word in arguments]


def _places(whole: Any) -> list[tuple[Any, Any]]:
    """Return the container and key of every member of every nested object and list."""
    places, left = [], [whole]
    while left:
        container = left.pop()
        keys = (list(container) if isinstance(container, dict)
                else range(len(container)) if isinstance(container, list) else ())
        for key in keys:
            places.append((container, key))
            left.append(container[key])
    return places
