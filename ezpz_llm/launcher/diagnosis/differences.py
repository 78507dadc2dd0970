"""Comparison of ranks in a hang, to find the rank that other ranks wait for.

That rank is stopped, elsewhere in the program, or some steps behind; waiting ranks are all in one place.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import group_by_key, system_text
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.diagnosis.liveness import UNUSUAL_STATES, RankLife
from ezpz_llm.launcher.on_nodes.tracebacks import is_user_code

Frame = tuple[str, int, str]
"""File, line and function."""

_FAULT_HANDLER = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d{1,9})(?:,? in (?P<function>.+))?$')
_PY_SPY = re.compile(r"^ +(?P<function>\S+) \((?P<file>[^()]+):(?P<line>\d{1,9})\)$")
_OUTERMOST = ("<module>", "_run_module_as_main")
_MAX_FRAMES = 500
_MAX_PLACES = 3
_LAST_CALLS = 8
"""Innermost calls that are searched for known waits; outer frames belong to the caller of the library."""


def describe_blocking_rank(silent: Sequence[RankLife], ranks: Sequence[RankLife],
                           stacks: Mapping[int, Path]) -> str:
    """Describe in one line the rank that other ranks wait for, and how it differs from them.

    Args:
        silent: the silent ranks, most suspect first.
        ranks: all ranks that have not ended.
        stacks: stack files, by rank; may lack ranks.
    """
    first, other_lives = silent[0], silent[1:]
    running = [life.rank for life in other_lives if life.state != first.state]
    if first.state in UNUSUAL_STATES and running:
        return f"{first}, unlike {rank_ranges(running)}"
    places = {rank: frames for rank, path in stacks.items() if (frames := main_stack(system_text(path)))}
    if split := minority_ranks({life.rank: places[life.rank] for life in silent if life.rank in places}):
        first = next(life for life in silent if life.rank == split[0][0])
        return f"{first}; {_describe_split(split)}"
    steps = {life.rank: life.step for life in ranks if life.step is not None}
    low, high = (min(steps.values()), max(steps.values())) if steps else (0, 0)
    if low < high and first.step == low:
        behind = [rank for rank, step in steps.items() if step == low]
        slow = {life.host for life in ranks if life.rank in behind}
        is_whole_nodes = slow.isdisjoint(life.host for life in ranks if life.rank not in behind)
        hosts = f" (all of {', '.join(sorted(slow))})" if is_whole_nodes and len(behind) > len(slow) else ""
        return f"{first}; {rank_ranges(behind)}{hosts} {_is_or_are(behind)} behind, others reached step {high}"
    return f"{first}{f' (and {len(other_lives)} more)' if other_lives else ''}"


def find_blocking_ranks(stacks: Mapping[int, Sequence[Frame]]) -> tuple[list[int], str]:
    """Return the ranks whose wait explains the hang, and a description of where ranks are.

    These are the minority if a majority of ranks is in the same place, else all ranks. The description is empty if
    the ranks are in more than three places, or if no stack is known.
    """
    if split := minority_ranks(stacks):
        return split[0], _describe_split(split)
    ranks_at = group_by_key((_format_place(stacks[rank]), rank) for rank in sorted(stacks))
    if len(ranks_at) > _MAX_PLACES:
        return sorted(stacks), ""
    return sorted(stacks), ", ".join(f"{rank_ranges(ranks)} {_is_or_are(ranks)} at {place}"
                                     for place, ranks in ranks_at.items())


def last_calls(frames: Sequence[Frame]) -> list[str]:
    """Format the innermost calls of a stack, innermost first, as lines for `find_text`."""
    # py-spy names the class of a method since Python 3.11.
    return [f"at {file}:{line} in {function.rpartition('.')[2]}"
            for file, line, function in reversed(frames[-_LAST_CALLS:])]


def stack_in_log(text: str) -> list[Frame]:
    """Return the main thread's stack from the log of a rank that was sent SIGABRT to print it."""
    _, header, report = text.rpartition("Fatal Python error: Aborted\n")
    return main_stack(report) if header else []


_Split = tuple[list[int], str, list[int], str]
"""Minority ranks and their place, majority ranks and their place."""


def minority_ranks(stacks: Mapping[int, Sequence[Frame]]) -> _Split | None:
    """Return the ranks that are not where the majority is, with both places.

    None if all ranks are in the same place, or no place has more than half of them.

    Args:
        stacks: the frames of each rank, outermost first.
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
    majority = sorted(rank for rank, frames in stacks.items() if tuple(frames[:depth + 1]) == usual)
    minority = sorted(stacks.keys() - set(majority))
    return minority, _common_place(stacks, minority), majority, _common_place(stacks, majority)


def _common_place(stacks: Mapping[int, Sequence[Frame]], ranks: Sequence[int]) -> str:
    """Describe the innermost call that is the same on all these ranks."""
    levels = zip(*(stacks[rank] for rank in ranks), strict=False)
    return _format_place([frames[0] for frames in itertools.takewhile(lambda frames: len(set(frames)) == 1, levels)]
                         or stacks[ranks[0]])


def main_stack(text: str) -> list[Frame]:
    """Return the main thread's frames, outermost first, from the output of py-spy or faulthandler.

    Empty if the text has no stack of the main thread.
    """
    frames: list[Frame] = []
    for line in [*text.splitlines(), ""]:
        match = _FAULT_HANDLER.match(line) or _PY_SPY.match(line)
        if match is None:
            if frames and frames[-1][2] in _OUTERMOST:
                return frames[::-1][:_MAX_FRAMES]
            frames = []
        else:
            frames.append((match["file"], int(match["line"]), match["function"] or "?"))
    return []


def _describe_split(split: _Split) -> str:
    minority, place, majority, usual = split
    return f"{rank_ranges(minority)} {_is_or_are(minority)} at {place}, {rank_ranges(majority)} at {usual}"


def _format_place(frames: Sequence[Frame]) -> str:
    """Describe the innermost call, and the line of the user's code that led to it."""
    user = next((frame for frame in reversed(frames) if is_user_code(frame[0])), frames[-1])
    inner, outer = (f"{os.path.basename(file)}:{line} in {function}" for file, line, function in (frames[-1], user))
    return inner if user == frames[-1] else f"{inner} (called from {outer})"


def _is_or_are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
