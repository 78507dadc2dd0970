"""Do all-reduces give the right sums, and how fast, for all ranks and for pairs of each kind?"""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist

from ezpz_llm.dist import Dist

ALL, SAME, ACROSS = "all ranks", "same node", "across nodes"
MOST_PAIRS = 32
"""Pairs of a kind that are measured, all at the same time; of more, these are spread evenly."""

_WARM_UP, _REPEATS = 2, 5
_BYTES = {"cpu": 2**24}
_ACCELERATOR_BYTES = 2**27


@dataclass(frozen=True)
class Reduction:
    """One kind of group. `gigabytes_per_second` is 2(n-1)/n x bytes / time of a group of n, the median group's."""

    kind: str
    groups: int
    wrong_ranks: tuple[int, ...]
    bytes: int
    seconds: float
    gigabytes_per_second: float
    slowest: tuple[int, ...]
    slowest_gigabytes_per_second: float


def pair_up(hosts: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Pairs of ranks on one node, and on two, no rank twice in a kind; `hosts` has the host of each rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    same = [pair for ranks in nodes.values() for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    ranks_of = list(nodes.values())
    # The first node with the second, the third with the fourth, and so on.
    neighbours = [*zip(ranks_of[::2], ranks_of[1::2], strict=False)]
    across = [pair for one, other in neighbours for pair in zip(one, other, strict=False)]
    return {SAME: _spread(same), ACROSS: _spread(across)}


def _spread(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(pairs) <= MOST_PAIRS:
        return pairs
    return [pairs[round(i * (len(pairs) - 1) / (MOST_PAIRS - 1))] for i in range(MOST_PAIRS)]


def measure_reductions(dist: Dist) -> list[Reduction]:
    """Test and time all-reduces in groups of every kind there is; empty for a single rank. Collective."""
    if dist.world_size == 1:
        return []
    hosts: list[Any] = [None] * dist.world_size
    torch_dist.all_gather_object(hosts, socket.gethostname())
    kinds: dict[str, list[tuple[int, ...]]] = {ALL: [tuple(range(dist.world_size))], **pair_up(hosts)}
    return [_test_kind(dist, kind, groups) for kind, groups in kinds.items() if groups]


def _test_kind(dist: Dist, kind: str, groups: list[tuple[int, ...]]) -> Reduction:
    size = _BYTES.get(dist.device.type, _ACCELERATOR_BYTES)
    own, made = None, []
    for ranks in groups:
        group = None if len(ranks) == dist.world_size else torch_dist.new_group(list(ranks))
        if dist.rank in ranks:
            own = ranks, group
            made += [group] if group is not None else []
    outcome = (own[0], *_reduce(dist, *own, size // 4)) if own else None
    outcomes: list[Any] = [None] * dist.world_size
    torch_dist.all_gather_object(outcomes, outcome)
    for group in made:
        torch_dist.destroy_process_group(group)

    slowest_rank: dict[tuple[int, ...], float] = {}
    for ranks, _, seconds in filter(None, outcomes):
        slowest_rank[ranks] = max(seconds, slowest_rank.get(ranks, 0.0))
    rates = {ranks: 2 * (len(ranks) - 1) / len(ranks) * size / seconds / 1e9
             for ranks, seconds in slowest_rank.items()}
    slowest = min(rates, key=rates.__getitem__)
    wrong = tuple(rank for rank, outcome in enumerate(outcomes) if outcome is not None and not outcome[1])
    return Reduction(kind, len(groups), wrong, size, statistics.median(slowest_rank.values()),
                     statistics.median(rates.values()), slowest, rates[slowest])


def _reduce(dist: Dist, ranks: tuple[int, ...], group: Any, count: int) -> tuple[bool, float]:
    """Whether every sum was right, and the median seconds of one all-reduce of `count` floats on this rank."""
    # Small whole numbers, whose sums floats hold exactly up to 65,000 ranks.
    pattern = (torch.arange(count, device=dist.device) % 251).float()
    expected = pattern * len(ranks) + sum(rank % 7 for rank in ranks)
    right, times = True, []
    for _ in range(_WARM_UP + _REPEATS):
        values = pattern + dist.rank % 7
        _wait(dist.device)
        start = time.perf_counter()
        torch_dist.all_reduce(values, group=group)
        _wait(dist.device)
        times.append(time.perf_counter() - start)
        right = right and bool(torch.equal(values, expected))
    return right, statistics.median(times[_WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
