"""Compact lists: hostnames (`nid[001-004],gpu01`), counts per node (`2(x2),1`), ranks or cores (`0-3,8`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product

from ezpz_llm.core.base import (
    MAX_CORES_PER_NODE,
    MAX_HOSTNAME_LENGTH,
    MAX_NODES,
    MAX_RANKS,
    UserError,
    count_noun,
    group_by_key,
)

_HOSTS_SHOWN = 8
ACCEPTED = "a list such as nid[001-004,007],gpu01"

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
_SEPARATORS = re.compile(r"[\s,]+")
_WORD = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_REPEAT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm host list into hostnames, in the order of `scontrol show hostnames`; keep duplicates.

    With several brackets in a name, the last varies fastest, then the first, the second, and so on (Slurm 22.05).
    Text after the last bracket is accepted, although Slurm 22.05 rejects it. `(null)` is the empty list.

    Raises:
        UserError: `text` is not a host list.
    """
    text = text.strip()
    hosts: list[str] = []
    at = 0
    while at < len(text) and text != "(null)":
        if match := _SEPARATORS.match(text, at):
            at = match.end()
        elif match := _WORD.match(text, at):
            hosts += _expand_word(match[0], text, MAX_NODES - len(hosts))
            at = match.end()
        else:
            raise _not_a_list(text)
    return hosts


def _expand_word(word: str, text: str, maximum: int) -> list[str]:
    tokens = _PART.findall(word)
    ranges = [_read_bracket(inside, text) for inside, literal in tokens if not literal]
    # Count before expanding: a short list can name more hosts than fit into memory.
    if math.prod(sum(len(numbers) for numbers, _ in bracket) for bracket in ranges) > maximum:
        raise UserError(f"the host list has more than {MAX_NODES:,} hosts: {_quoted(text)}",
                        instead=ACCEPTED)
    if sum(len(literal) or 1 for _, literal in tokens) > MAX_HOSTNAME_LENGTH:
        raise _not_a_list(text)
    brackets = ([f"{number:0{width}d}" for numbers, width in bracket for number in numbers] for bracket in ranges)
    parts = [[literal] if literal else next(brackets) for _, literal in tokens]
    *outer, last = [place for place, (_, literal) in enumerate(tokens) if not literal] or [0]
    # The last factor of product() varies fastest.
    order = [*(place for place in range(len(parts)) if place != last and place not in outer), *outer[::-1], last]
    back = sorted(range(len(order)), key=order.__getitem__)
    return ["".join([values[place] for place in back]) for values in product(*(parts[place] for place in order))]


def _read_bracket(inside: str, text: str) -> list[tuple[range, int]]:
    """Return the ranges of a bracket, each with the zero-padded width of its lower bound."""
    ranges = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _not_a_list(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _not_a_list(text)
        ranges.append((range(first, last + 1), len(match[1])))
    return ranges


def _not_a_list(text: str) -> UserError:
    return UserError(f"not a Slurm host list: {_quoted(text)}", instead=ACCEPTED)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


def fold_hostnames(hosts: Sequence[str]) -> str:
    """Return the compact form of `hosts`, the inverse of `expand_hostlist`: n[1-3],n7."""
    runs: list[tuple[str, str, str, int]] = []  # text before the number, first number, text after it, count
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        before, number, after = match.groups() if match else (host, "", "")
        if runs and number:
            first, count = runs[-1][1], runs[-1][3]
            following = f"{int(first or 0) + count:0{len(first)}d}"
            if (runs[-1][0], following, runs[-1][2]) == (before, number, after) and first:
                runs[-1] = (before, first, after, count + 1)
                continue
        runs.append((before, number, after, 1))
    return ",".join(f"{before}{number}{after}" if count == 1 else
                    f"{before}[{number}-{int(number) + count - 1:0{len(number)}d}]{after}"
                    for before, number, after, count in runs)


def fold_counts(counts: Sequence[int]) -> str:
    """Return the compact form of counts, the inverse of `expand_counts`: [2, 2, 1] as `2(x2),1`."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's counts per node: `2(x2),1` to [2, 2, 1].

    Raises:
        UserError: `text` does not have that form.
    """
    matches = [_REPEAT.fullmatch(item.strip()) for item in text.split(",")]
    if not all(matches):
        raise UserError(f"not a list of counts per node: {_quoted(text)}", instead="numbers such as 2(x2),1")
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if sum(times for _, times in counts) > MAX_NODES or max(count for count, _ in counts) > MAX_CORES_PER_NODE:
        raise UserError(f"more than {MAX_NODES:,} nodes, or more than {MAX_CORES_PER_NODE:,} per node: "
                        f"{_quoted(text)}", instead="numbers such as 2(x2),1")
    return [count for count, times in counts for _ in range(times)]

def fold_numbers(numbers: Iterable[int]) -> str:
    """Return the compact form of a set of numbers, sorted: [0, 1, 2, 5] as `0-2,5`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def expand_numbers(text: str) -> tuple[int, ...]:
    """Expand a list of numbers, keeping its order: `0-2,5` to (0, 1, 2, 5).

    Raises:
        ValueError: `text` is not such a list, or has numbers too large for a rank.
    """
    expanded: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if numbers.stop > MAX_RANKS:
            raise ValueError(f"more than {MAX_RANKS:,} ranks")
        expanded += numbers
    return tuple(expanded)


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 3` or `ranks 0-2,5`."""
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {fold_numbers(ranks)}"


def fold_rank_places(hosts: Mapping[int, str]) -> str:
    """Return ranks by node as text: {2: "n2", 3: "n2", 6: "n4"} as "ranks 2-3 on n2, rank 6 on n4"."""
    by_node = list(group_by_key((host, rank) for rank, host in hosts.items()).items())
    groups = [f"{rank_ranges(ranks)} on {host}" for host, ranks in by_node[:_HOSTS_SHOWN]]
    if omitted := by_node[_HOSTS_SHOWN:]:
        groups.append(f"{rank_ranges(rank for _, ranks in omitted for rank in ranks)} on "
                      f"{count_noun(len(omitted), 'more node')}")
    return ", ".join(groups)
