"""Slurm's short forms for long lists: hosts (`nid[001-004,007],gpu01`) and numbers a node (`2(x2),1`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, product

from ezpz_llm.errors import UserError

ACCEPTED = "a list such as nid[001-004,007],gpu01"

_MOST_HOSTS = 1_000_000
"""A range with more is a slip of the finger, and would fill the memory."""

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
_SEPARATORS = re.compile(r"[\s,]+")
_WORD = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEAT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list, in its order, repeats kept; of several brackets in a name the first counts slowest.

    Text after the last bracket is accepted, which Slurm 22.05 refuses. Slurm's own `(null)` names no host.

    Raises:
        UserError: quoting `text`, where it is not a host list.
    """
    text = text.strip()
    hosts: list[str] = []
    at = 0
    while at < len(text) and text != "(null)":
        if match := _SEPARATORS.match(text, at):
            at = match.end()
        elif match := _WORD.match(text, at):
            hosts += _expand_word(match[0], text)
            at = match.end()
        else:
            raise _not_a_list(text)
        if len(hosts) > _MOST_HOSTS:
            raise _not_a_list(text)
    return hosts


def _expand_word(word: str, text: str) -> list[str]:
    parts = [[literal] if literal else _expand_bracket(inside, text) for inside, literal in _PART.findall(word)]
    return ["".join(name) for name in product(*parts)]


def _expand_bracket(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _not_a_list(text)
        # The lower bound's zeros give the width.
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _not_a_list(text: str) -> UserError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return UserError(f"not a Slurm host list: {shown!r}", instead=ACCEPTED)


def fold_hosts(hosts: Sequence[str]) -> str:
    """The short form of `hosts` in their order, which `expand_hosts` reads back: n[1-3],n7."""
    found: list[tuple[str, str, str, int]] = []  # what is before the number, it, what follows, how many
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        before, number, after = match.groups() if match else (host, "", "")
        if found and number:
            first, count = found[-1][1], found[-1][3]
            following = f"{int(first or 0) + count:0{len(first)}d}"
            if (found[-1][0], following, found[-1][2]) == (before, number, after) and first:
                found[-1] = (before, first, after, count + 1)
                continue
        found.append((before, number, after, 1))
    return ",".join(f"{before}{number}{after}" if count == 1 else
                    f"{before}[{number}-{int(number) + count - 1:0{len(number)}d}]{after}"
                    for before, number, after, count in found)


def fold_counts(counts: Sequence[int]) -> str:
    """The short form that `expand_counts` reads back: [2, 2, 1] as `2(x2),1`."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def expand_counts(text: str) -> list[int]:
    """`2(x2),1` as [2, 2, 1].

    Raises:
        UserError: quoting `text`, where it is not of that form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _REPEAT.fullmatch(item.strip())
        if match is None:
            raise UserError(f"not Slurm's numbers per node: {text!r}", instead="numbers such as 2(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
