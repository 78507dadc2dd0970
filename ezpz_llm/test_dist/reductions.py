"""Do all-reduces give the right sums, and how fast, for all ranks and for pairs of each kind?"""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist

from ezpz_llm.base import grouped
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather
from ezpz_llm.dist.device import synchronize

ALL, SAME, ACROSS = "all ranks", "same node", "across nodes"
MOST_PAIRS = 32
"""Pairs of a kind that are measured, all at the same time; of more, these are spread evenly."""

_WARM_UP, _REPEATS = 2, 5
_BYTES = (2**12, 2**22)
"""A message that takes as long as an empty one (the latency), and one of a gradient bucket's order."""

_LARGEST = {"cpu": 2**24}
_ACCELERATOR_LARGEST = 2**27


@dataclass(frozen=True)
class Reduction:
    """One size in one kind of group, the median group's numbers.

    The algorithm's bandwidth is bytes / time, the bus bandwidth of n ranks 2(n-1)/n times that, which is what each
    rank's link has to carry in a ring whatever n is (as in NVIDIA's nccl-tests).
    """

    kind: str
    groups: int
    wrong_ranks: tuple[int, ...]
    bytes: int
    seconds: float
    algorithm_gigabytes_per_second: float
    bus_gigabytes_per_second: float
    slowest: tuple[int, ...]
    slowest_bus_gigabytes_per_second: float


def pair_up(hosts: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Pairs of ranks on one node, and on two, no rank twice in a kind; `hosts` has the host of each rank."""
    nodes = list(grouped((host, rank) for rank, host in enumerate(hosts)).values())
    same: list[tuple[int, ...]] = [pair for ranks in nodes for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    # The first node with the second, the third with the fourth, and so on.
    across: list[tuple[int, ...]] = [pair for one, other in zip(nodes[::2], nodes[1::2], strict=False)
                                     for pair in zip(one, other, strict=False)]
    return {SAME: _spread(same), ACROSS: _spread(across)}


def _spread(pairs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if len(pairs) <= MOST_PAIRS:
        return pairs
    return [pairs[round(i * (len(pairs) - 1) / (MOST_PAIRS - 1))] for i in range(MOST_PAIRS)]


def measure_reductions(dist: Dist) -> list[Reduction]:
    """Test and time all-reduces in groups of every kind there is; empty for a single rank. Collective."""
    if dist.world_size == 1:
        return []
    hosts = all_gather(dist, socket.gethostname())
    kinds: dict[str, list[tuple[int, ...]]] = {ALL: [tuple(range(dist.world_size))], **pair_up(hosts)}
    return [one for kind, groups in kinds.items() if groups for one in _test_kind(dist, kind, groups)]


def _test_kind(dist: Dist, kind: str, groups: list[tuple[int, ...]]) -> list[Reduction]:
    own, made = None, []
    for ranks in groups:
        group = None if len(ranks) == dist.world_size else torch_dist.new_group(list(ranks))
        if dist.rank in ranks:
            own = ranks, group
            made += [group] if group is not None else []
    sizes = (*_BYTES, _LARGEST.get(dist.device.type, _ACCELERATOR_LARGEST))
    found = [_test_size(dist, kind, len(groups), own, size) for size in sizes]
    for group in made:
        torch_dist.destroy_process_group(group)
    return found


def _test_size(dist: Dist, kind: str, groups: int, own: tuple[tuple[int, ...], Any] | None,
               size: int) -> Reduction:
    """One size in all groups of a kind at once; `own` is this rank's group, None if it is in none. Collective."""
    outcome = (own[0], *_reduce(dist, *own, size // 4)) if own else None
    outcomes = all_gather(dist, outcome)
    slowest_rank: dict[tuple[int, ...], float] = {}
    for ranks, _, seconds in filter(None, outcomes):
        slowest_rank[ranks] = max(seconds, slowest_rank.get(ranks, 0.0))
    slowest = max(slowest_rank, key=slowest_rank.__getitem__)
    rate = size / statistics.median(slowest_rank.values()) / 1e9
    bus = 2 * (len(slowest) - 1) / len(slowest)
    wrong = tuple(rank for rank, outcome in enumerate(outcomes) if outcome is not None and not outcome[1])
    return Reduction(kind, groups, wrong, size, statistics.median(slowest_rank.values()), rate, bus * rate, slowest,
                     bus * size / slowest_rank[slowest] / 1e9)


def _reduce(dist: Dist, ranks: tuple[int, ...], group: Any, count: int) -> tuple[bool, float]:
    """Whether every sum was right, and the median seconds of one all-reduce of `count` floats on this rank."""
    # Small whole numbers, whose sums floats hold exactly up to 20,000 ranks. A rank's place in the group, not its
    # number, is what it adds: the two of a pair never add the same, so that twice the own value is not the sum.
    pattern = (torch.arange(count, device=dist.device) % 251).float()
    contributions = [place % 509 for place in range(len(ranks))]
    added = contributions[ranks.index(dist.rank)]
    expected = pattern * len(ranks) + sum(contributions)
    right, times = True, []
    for _ in range(_WARM_UP + _REPEATS):
        values = pattern + added
        synchronize(dist.device)
        start = time.perf_counter()
        torch_dist.all_reduce(values, group=group)
        synchronize(dist.device)
        times.append(time.perf_counter() - start)
        right = right and bool(torch.equal(values, expected))
    return right, statistics.median(times[_WARM_UP:])
