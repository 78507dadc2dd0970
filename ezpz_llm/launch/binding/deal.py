"""Dealing a host's cores to its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.launch.binding.topology import Core, Domain, Topology


def deal(topology: Topology, ranks: int) -> tuple[tuple[Core, ...], ...]:
    """The cores of each of `ranks` local ranks; () where there are fewer cores than ranks.

    Ranks are dealt over sockets evenly, by the number of cores that each has, and no rank is on two sockets unless
    there are fewer ranks than sockets. On one socket all ranks get equally many neighbouring cores. They keep to
    NUMA domains where that costs no core: where the one number divides the other.
    """
    sockets = topology.sockets
    if ranks > len(topology.cores) or not ranks:
        return ()
    if ranks <= len(sockets):
        parts = [sockets[len(sockets) * rank // ranks:len(sockets) * (rank + 1) // ranks] for rank in range(ranks)]
        return tuple(_joined([domain for socket in part for domain in socket]) for part in parts)
    shares = _shares([len(_joined(socket)) for socket in sockets], ranks)
    return tuple(cores for socket, share in zip(sockets, shares, strict=True) if share
                 for cores in _on_one_socket(socket, share))


def _shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """`ranks` in proportion to `sizes`, rounded by the largest remainder; none is larger than its size."""
    total = sum(sizes)
    shares = [ranks * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda place: -(ranks * sizes[place] % total))
    for place in by_remainder[:ranks - sum(shares)]:
        shares[place] += 1
    return shares


def _on_one_socket(domains: Sequence[Domain], ranks: int) -> list[tuple[Core, ...]]:
    each = len(_joined(domains)) // ranks
    groups = [domains]
    if ranks % len(domains) == 0:
        groups = [(domain,) for domain in domains]
    elif len(domains) % ranks == 0:
        width = len(domains) // ranks
        groups = [domains[place:place + width] for place in range(0, len(domains), width)]
    in_group = ranks // len(groups)
    if any(len(_joined(group)) < each * in_group for group in groups):
        groups, in_group = [domains], ranks
    return [_joined(group)[each * place:each * (place + 1)] for group in groups for place in range(in_group)]


def _joined(domains: Sequence[Domain]) -> tuple[Core, ...]:
    return tuple(core for domain in domains for core in domain.cores)
