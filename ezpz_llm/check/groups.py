"""Which ranks measure together: those of a host, and hosts with their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[int, str]
"""A rank and its host."""


def node_groups(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The ranks of each host that runs several."""
    return [tuple(ranks) for ranks in _by_host(places).values() if len(ranks) > 1]


def link_groups(places: Sequence[Place]) -> list[list[tuple[int, ...]]]:
    """Rounds of pairs of ranks on neighbouring hosts; in a round each host has one neighbour at most, and all pairs
    of a round can measure at the same time.

    The hosts form a ring, so that each is measured with both of its neighbours. The n-th rank of a host pairs with
    the n-th of the other: where each rank has a network adapter of its own, each adapter is measured.
    """
    by_host = _by_host(places)
    hosts = list(by_host)
    return [[pair for one, other in turn for pair in zip(by_host[hosts[one]], by_host[hosts[other]], strict=False)]
            for turn in ring_rounds(len(hosts))]


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """The edges of a ring of `count` hosts in two or three rounds, no host twice in one; one edge for two hosts."""
    if count < 2:
        return []
    even = [(i, i + 1) for i in range(0, count - 1, 2)]
    odd = [(i, i + 1) for i in range(1, count - 1, 2)]
    closing = [(count - 1, 0)] if count > 2 else []
    # With an even number of hosts the closing edge is free in the odd round; with an odd number in neither.
    rounds = [even, odd, closing] if count % 2 else [even, odd + closing]
    return [turn for turn in rounds if turn]


def _by_host(places: Sequence[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in sorted(places):
        found.setdefault(host, []).append(rank)
    return found
