"""Differences between ranks that have all fallen silent: which one is stopped, somewhere else in its program, or
behind. The ranks that wait are alike; the one that they wait for is not."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ezpz_llm.base import system_text
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.liveness import UNUSUAL_STATES, RankLife

Frame = tuple[str, int, str]
"""File, line and function."""

_FAULT_HANDLER = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d{1,9})(?:,? in (?P<function>.+))?$')
_PY_SPY = re.compile(r"^ +(?P<function>\S+) \((?P<file>[^()]+):(?P<line>\d{1,9})\)$")
_OUTERMOST = ("<module>", "_run_module_as_main")
_MOST_FRAMES = 500
_LAST_CALLS = 8
"""Calls of a stack that say what a rank waits for: those further out have called a whole library."""


def as_compared(silent: Sequence[RankLife], ranks: Sequence[RankLife], stacks: Mapping[int, Path]) -> str:
    """The rank that the others wait for, in one line, with what it differs in; `silent` has the most suspect one
    first, `ranks` are all that have not ended, and `stacks` the files of some of them."""
    first, others = silent[0], silent[1:]
    alike = [one.rank for one in others if one.state != first.state]
    if first.state in UNUSUAL_STATES and alike:
        return f"{first}, which {rank_ranges(alike)} {_are(alike)} not"
    places = {rank: frames for rank, path in stacks.items() if (frames := main_stack(system_text(path)))}
    if odd := odd_ones_out({one.rank: places[one.rank] for one in silent if one.rank in places}):
        first = next(one for one in silent if one.rank == odd[0][0])
        return f"{first}; {_apart(odd)}"
    steps = {one.rank: one.step for one in ranks if one.step is not None}
    low, high = (min(steps.values()), max(steps.values())) if steps else (0, 0)
    if low < high and first.step == low:
        behind = [rank for rank, step in steps.items() if step == low]
        slow = {one.host for one in ranks if one.rank in behind}
        is_of_hosts = slow.isdisjoint(one.host for one in ranks if one.rank not in behind)
        hosts = f" (all of {', '.join(sorted(slow))})" if is_of_hosts and len(behind) > len(slow) else ""
        return f"{first}; {rank_ranges(behind)}{hosts} {_are(behind)} behind, others reached step {high}"
    return f"{first}{f' and {len(others)} more' if others else ''}"


def where_they_stand(stacks: Mapping[int, Sequence[Frame]]) -> tuple[list[int], str]:
    """The ranks to ask what they wait for (those that are apart, else all), and where which ones are, in words;
    empty where they are in several places, or nothing is known."""
    if odd := odd_ones_out(stacks):
        return odd[0], _apart(odd)
    ranks = sorted(stacks)
    if len({tuple(frames) for frames in stacks.values()}) != 1:
        return ranks, ""
    return ranks, f"{rank_ranges(ranks)} {_are(ranks)} at {_place(stacks[ranks[0]])}"


def last_calls(frames: Sequence[Frame]) -> list[str]:
    """A stack's last calls, the innermost first, as lines that known texts are searched in."""
    return [f"at {file}:{line} in {function}" for file, line, function in reversed(frames[-_LAST_CALLS:])]


def stack_in_log(text: str) -> list[Frame]:
    """The main thread's stack that faulthandler printed of a rank which was asked where it stands."""
    _, found, report = text.rpartition("Fatal Python error: Aborted\n")
    return main_stack(report) if found else []


_Odd = tuple[list[int], str, list[int], str]


def odd_ones_out(stacks: Mapping[int, Sequence[Frame]]) -> _Odd | None:
    """The ranks that are somewhere else than most, and where; the most, and where they are. None where all are in
    one place, or none has more than half.

    Args:
        stacks: of each rank, the outermost frame first.
    """
    if len(stacks) < 3:
        return None
    depth = 0
    while len({tuple(frames[:depth + 1]) for frames in stacks.values()}) == 1:
        if all(len(frames) <= depth for frames in stacks.values()):
            return None
        depth += 1
    groups = Counter(tuple(frames[:depth + 1]) for frames in stacks.values())
    usual, count = groups.most_common(1)[0]
    if 2 * count <= len(stacks):
        return None
    most = sorted(rank for rank, frames in stacks.items() if tuple(frames[:depth + 1]) == usual)
    odd = sorted(stacks.keys() - set(most))
    return odd, _place(stacks[odd[0]][:depth + 1]), most, _place(usual)


def main_stack(text: str) -> list[Frame]:
    """The main thread's frames in a stacks file, the outermost first, as py-spy or Python's fault handler wrote
    them; empty where it has none."""
    frames: list[Frame] = []
    for line in [*text.splitlines(), ""]:
        match = _FAULT_HANDLER.match(line) or _PY_SPY.match(line)
        if match is None:
            if frames and frames[-1][2] in _OUTERMOST:
                return frames[::-1][:_MOST_FRAMES]
            frames = []
        else:
            frames.append((match["file"], int(match["line"]), match["function"] or "?"))
    return []


def _apart(odd: _Odd) -> str:
    few, here, most, there = odd
    return f"{rank_ranges(few)} {_are(few)} at {here}, {rank_ranges(most)} at {there}"


def _place(frames: Sequence[Frame]) -> str:
    file, line, function = frames[-1]
    return f"{os.path.basename(file)}:{line} in {function}"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
