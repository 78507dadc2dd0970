"""Short forms of long lists: hosts (`nid[001-004],gpu01`), numbers a node (`2(x2),1`), ranks or cores (`0-3,8`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product

from ezpz_llm.base import LONGEST_HOST, MOST_CORES_ON_A_HOST, MOST_HOSTS, MOST_RANKS, UserError, grouped

_HOSTS_SHOWN = 8
ACCEPTED = "a list such as nid[001-004,007],gpu01"

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
_SEPARATORS = re.compile(r"[\s,]+")
_WORD = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_REPEAT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as `scontrol show hostnames` orders them, repeats kept: of several brackets in a name the
    last counts fastest, and of the others the first (22.05).

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
            hosts += _expand_word(match[0], text, MOST_HOSTS - len(hosts))
            at = match.end()
        else:
            raise _not_a_list(text)
    return hosts


def _expand_word(word: str, text: str, most: int) -> list[str]:
    found = _PART.findall(word)
    ranges = [_read_bracket(inside, text) for inside, literal in found if not literal]
    # Counted before anything is expanded: a few characters can stand for more than any memory holds.
    if math.prod(sum(len(numbers) for numbers, _ in bracket) for bracket in ranges) > most:
        raise UserError(f"this host list stands for more than {MOST_HOSTS:,} hosts: {_shown(text)}",
                        instead=ACCEPTED)
    if sum(len(literal) or 1 for _, literal in found) > LONGEST_HOST:
        raise _not_a_list(text)
    brackets = ([f"{number:0{width}d}" for numbers, width in bracket for number in numbers] for bracket in ranges)
    parts = [[literal] if literal else next(brackets) for _, literal in found]
    *others, last = [place for place, (_, literal) in enumerate(found) if not literal] or [0]
    # product() counts its last factor fastest.
    order = [*(place for place in range(len(parts)) if place != last and place not in others), *others[::-1], last]
    back = sorted(range(len(order)), key=order.__getitem__)
    return ["".join([values[place] for place in back]) for values in product(*(parts[place] for place in order))]


def _read_bracket(inside: str, text: str) -> list[tuple[range, int]]:
    """The ranges of a bracket, each with the width of its numbers, which the lower bound's zeros give."""
    found = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _not_a_list(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _not_a_list(text)
        found.append((range(first, last + 1), len(match[1])))
    return found


def _not_a_list(text: str) -> UserError:
    return UserError(f"not a Slurm host list: {_shown(text)}", instead=ACCEPTED)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


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
    found = [_REPEAT.fullmatch(item.strip()) for item in text.split(",")]
    if not all(found):
        raise UserError(f"not Slurm's numbers per node: {_shown(text)}", instead="numbers such as 2(x2),1")
    counts = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if sum(times for _, times in counts) > MOST_HOSTS or max(count for count, _ in counts) > MOST_CORES_ON_A_HOST:
        raise UserError(f"these are numbers for more than {MOST_HOSTS:,} nodes, or more than a node can have: "
                        f"{_shown(text)}", instead="numbers such as 2(x2),1")
    return [count for count, times in counts for _ in range(times)]

# Ranks, cores or steps: `0-3,8`.
def fold_numbers(numbers: Iterable[int]) -> str:
    """The short form of whole numbers, sorted, each once: [0, 1, 2, 5] as `0-2,5`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def expand_numbers(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5), in the order of the text.

    Raises:
        ValueError: it is no such list, or has numbers that no rank has.
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if numbers.stop > MOST_RANKS:
            raise ValueError(f"more ranks than {MOST_RANKS:,}")
        found += numbers
    return tuple(found)


def rank_ranges(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2,5`."""
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {fold_numbers(ranks)}"


def fold_places(hosts: Mapping[int, str]) -> str:
    """{2: "n2", 3: "n2", 6: "n4"} as "ranks 2-3 on n2, rank 6 on n4"; of many hosts the first ones."""
    by_host = list(grouped((host, rank) for rank, host in hosts.items()).items())
    shown = [f"{rank_ranges(ranks)} on {host}" for host, ranks in by_host[:_HOSTS_SHOWN]]
    if rest := by_host[_HOSTS_SHOWN:]:
        shown.append(f"{rank_ranges(rank for _, ranks in rest for rank in ranks)} on {len(rest)} more hosts")
    return ", ".join(shown)
