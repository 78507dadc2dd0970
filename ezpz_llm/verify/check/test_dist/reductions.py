"""Correctness and bandwidth of all-reduces among all ranks, and in pairs within and across nodes."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist

from ezpz_llm.core.base import group_by_key
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.dist.device import synchronize

ALL, SAME, ACROSS = "all ranks", "same node", "across nodes"
MAX_PAIRS = 32
"""Maximum number of pairs of a kind, spread evenly over the job. All pairs are measured at the same time."""

_WARM_UP, _REPEATS = 2, 5
_BYTES = (2**12, 2**22)
"""Message sizes: one dominated by latency, and one as large as a gradient bucket."""

_LARGEST = {"cpu": 2**24}
_ACCELERATOR_LARGEST = 2**27


@dataclass(frozen=True)
class Reduction:
    """Result for one message size and one kind of group. Times and bandwidths are those of the median group.

    The algorithm bandwidth is bytes / time. The bus bandwidth of n ranks is 2(n-1)/n times that, the traffic of
    each link in a ring of any size (as in NVIDIA's nccl-tests).
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
    """Return pairs of ranks on the same node and across nodes, each rank at most once per kind.

    Args:
        hosts: hostname of each rank.
    """
    nodes = list(group_by_key((host, rank) for rank, host in enumerate(hosts)).values())
    same: list[tuple[int, ...]] = [pair for ranks in nodes for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    # The first node with the second, the third with the fourth, and so on.
    across: list[tuple[int, ...]] = [pair for left, right in zip(nodes[::2], nodes[1::2], strict=False)
                                     for pair in zip(left, right, strict=False)]
    return {SAME: _spread(same), ACROSS: _spread(across)}


def _spread(pairs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if len(pairs) <= MAX_PAIRS:
        return pairs
    return [pairs[round(i * (len(pairs) - 1) / (MAX_PAIRS - 1))] for i in range(MAX_PAIRS)]


def measure_reductions(dist: Dist) -> list[Reduction]:
    """Test and time all-reduces in groups of every kind. Empty for a single rank. Collective."""
    if dist.world_size == 1:
        return []
    hosts = all_gather(dist, socket.gethostname())
    kinds: dict[str, list[tuple[int, ...]]] = {ALL: [tuple(range(dist.world_size))], **pair_up(hosts)}
    return [reduction for kind, groups in kinds.items() if groups for reduction in _test_kind(dist, kind, groups)]


def _test_kind(dist: Dist, kind: str, groups: list[tuple[int, ...]]) -> list[Reduction]:
    own_group, subgroups = None, []
    for ranks in groups:
        group = None if len(ranks) == dist.world_size else torch_dist.new_group(list(ranks))
        if dist.rank in ranks:
            own_group = ranks, group
            subgroups += [group] if group is not None else []
    sizes = (*_BYTES, _LARGEST.get(dist.device.type, _ACCELERATOR_LARGEST))
    results = [_test_size(dist, kind, len(groups), own_group, size) for size in sizes]
    for group in subgroups:
        torch_dist.destroy_process_group(group)
    return results


def _test_size(dist: Dist, kind: str, groups: int, own_group: tuple[tuple[int, ...], Any] | None,
               size: int) -> Reduction:
    """Test one size in all groups of a kind at the same time. Collective.

    Args:
        own_group: ranks and process group of this rank; None if this rank is in no group.
    """
    outcome = (own_group[0], *_reduce(dist, *own_group, size // 4)) if own_group else None
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
    """Return True if every sum was correct, and this rank's median seconds per all-reduce of `count` floats."""
    # Small integers, whose sums are exact in fp32 for up to 20,000 ranks. Each rank adds its index in the group, so
    # that the ranks of a pair add different values, and a rank that adds its own value twice is detected.
    pattern = (torch.arange(count, device=dist.device) % 251).float()
    contributions = [index % 509 for index in range(len(ranks))]
    contribution = contributions[ranks.index(dist.rank)]
    expected = pattern * len(ranks) + sum(contributions)
    is_correct, times = True, []
    for _ in range(_WARM_UP + _REPEATS):
        values = pattern + contribution
        synchronize(dist.device)
        start = time.perf_counter()
        torch_dist.all_reduce(values, group=group)
        synchronize(dist.device)
        times.append(time.perf_counter() - start)
        is_correct = is_correct and bool(torch.equal(values, expected))
    return is_correct, statistics.median(times[_WARM_UP:])
