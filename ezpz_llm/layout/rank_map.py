"""Which rank of which group runs on which host, before anything starts (imports no torch)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ezpz_llm.dist.degrees import AXES, Degrees
from ezpz_llm.layout.layout import Layout

Places = Sequence[tuple[str, int]]
"""Hosts and their numbers of ranks, in the order in which ranks are numbered."""

_ROWS = 32
"""Longer maps are drawn without their middle."""


def rank_map(layout: Layout, places: Places) -> str:
    """Each rank's place along every axis, and its host."""
    ends = list(accumulate(count for _, count in places))
    degrees = Degrees.of_world(ends[-1], layout.tp, layout.pp, layout.sp)
    axes = [axis for axis in AXES if axis == "dp" or getattr(degrees, axis) > 1]
    ranks = range(ends[-1])
    left_out = len(ranks) - _ROWS
    shown = [*ranks[:_ROWS // 2], *ranks[-(_ROWS // 2):]] if left_out > 0 else ranks
    rows = [("rank", *axes, "host")]
    for rank in shown:
        place = degrees.coordinates(rank)
        host = places[bisect_right(ends, rank)][0]
        rows.append((str(rank), *(str(place[axis]) for axis in axes), host))
    if left_out > 0:
        rows.insert(1 + _ROWS // 2, (f"… {left_out} more", *[""] * (len(axes) + 1)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]
    return "\n".join([f"ranks of {layout.describe(ends[-1])}", *lines])


def crossing(layout: Layout, places: Places, can_run: Callable[[int, int], bool]) -> str | None:
    """A warning where a tensor-parallel group has ranks on several hosts, with what to type; None where none has.

    Tensor-parallel ranks are neighbours and communicate several times a layer: between hosts that is slow.

    Args:
        can_run: whether the run is legal on so many ranks with another tensor-parallel degree.
    """
    ends = list(accumulate(count for _, count in places))
    # Groups begin at multiples of tp: one goes on beyond a host that ends elsewhere.
    cut = sorted({end // layout.tp for end in ends[:-1] if end % layout.tp})
    if not cut:
        return None
    first, last = cut[0] * layout.tp, cut[0] * layout.tp + layout.tp - 1
    hosts = [places[bisect_right(ends, rank)][0] for rank in (first, last)]
    text = (f"warning: {len(cut)} tensor-parallel group(s) of {layout.tp} cross hosts, such as ranks {first} to "
            f"{last} on {' to '.join(hosts)}")
    offers = _offers(layout, places, can_run)
    return f"{text}\n  instead: {' or '.join(offers)}" if offers else text


def _offers(layout: Layout, places: Places, can_run: Callable[[int, int], bool]) -> list[str]:
    """The nearest numbers of ranks a host that are multiples of tp, and the next smaller tp that fits the hosts."""
    below = max(count for _, count in places) // layout.tp * layout.tp
    ranks = [count for count in (below, below + layout.tp) if count and can_run(count * len(places), layout.tp)]
    world_size = sum(count for _, count in places)
    smaller = [tp for tp in range(layout.tp - 1, 0, -1) if layout.tp % tp == 0
               and all(count % tp == 0 for _, count in places) and can_run(world_size, tp)]
    return [*(f"launch --ppn {count}" for count in ranks), *(f"--tp {tp}" for tp in smaller[:1])]
