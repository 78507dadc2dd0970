"""Placement of ranks: ranks per node, and the table of nodes, cores and devices by rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, overload

from ezpz_llm.core.base import MAX_RANKS_PER_NODE, UserError, count_noun
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Node
from ezpz_llm.launcher.planning.rank_binding import Binding


class Placement:
    """Number of ranks on each node that has at least one, in rank order.

    Attributes:
        world_size: total number of ranks.
        most: largest number of ranks on any node.
        uniform: True if all nodes have the same number of ranks.
    """

    def __init__(self, ranks: tuple[tuple[str, int], ...], source: str) -> None:
        self.ranks = ranks
        self.source = source
        counts = [count for _, count in ranks]
        self.world_size = sum(counts)
        self.most = max(counts)
        self.uniform = len(set(counts)) == 1


def place_ranks(allocation: Allocation, devices: Devices, ranks: int | None, per_host: int | None) -> Placement:
    """Decide how many ranks each node gets.

    The number per node is `per_host`, else the slots of the allocation or the hostfile, else the number of devices
    if there are several, else 1. Devices have priority over slots that may count cores. With `ranks`, nodes are
    filled in order up to that number per node; if `ranks` exceeds their total, ranks are spread evenly.

    Args:
        devices: visible devices, or the site's.
        ranks: value of -n.
        per_host: value of --ppn.

    Raises:
        UserError: there are more ranks than --ppn, a hostfile's slots or MAX_RANKS_PER_NODE allow.
    """
    hosts = allocation.hosts
    if per_host is not None:
        world_size = per_host * len(hosts) if ranks is None else ranks
        if world_size > per_host * len(hosts):
            raise UserError(f"{ranks} ranks do not fit on {count_noun(len(hosts), 'node')} with {per_host} per "
                            "node",
                            where=f"-n {ranks} --ppn {per_host}",
                            instead=f"-n {per_host * len(hosts)}, or a larger --ppn")
        capacities, source = [per_host] * len(hosts), "--ppn"
    else:
        per_rank = allocation.devices_per_rank or 1
        capacities = [_default_capacity(host, devices, per_rank) for host in hosts]
        source = _capacity_source(allocation, devices)
        world_size = sum(capacities) if ranks is None else ranks
        if ranks is not None:
            source = "-n"
        if world_size > sum(capacities):
            capacities = _raise_capacities(allocation, capacities, world_size)
    counts = _fill(capacities, world_size)
    if max(counts) > MAX_RANKS_PER_NODE:
        raise UserError(f"{max(counts)} ranks on one node are too many", where=source,
                        instead=f"at most {MAX_RANKS_PER_NODE} per node")
    _check_slots(allocation, counts)
    return Placement(tuple((host.name, count) for host, count in zip(hosts, counts, strict=True) if count), source)


def devices_per_rank(allocation: Allocation, placement: Placement) -> int | None:
    """Return the number of devices that the job requests for each rank; None if it does not, or has too few."""
    devices, number = {host.name: host.devices for host in allocation.hosts}, allocation.devices_per_rank
    has_enough = number and all((count := devices[name]) is None or ranks * number <= count
                                for name, ranks in placement.ranks)
    return number if has_enough else None


def _default_capacity(host: Node, devices: Devices, per_rank: int) -> int:
    if host.slots is not None and _has_ranks_by_slots(host, devices, per_rank):
        return host.slots
    return max(1, _count_shares(host, devices, per_rank))


def _count_shares(host: Node, devices: Devices, per_rank: int) -> int:
    """Return for how many ranks the node has devices."""
    return (len(devices.ids) if host.devices is None else host.devices) // per_rank


def _has_ranks_by_slots(host: Node, devices: Devices, per_rank: int) -> bool:
    shares = _count_shares(host, devices, per_rank)
    return host.slots is not None and not (host.slots_count_cores and 0 < shares < host.slots)


def _capacity_source(allocation: Allocation, devices: Devices) -> str:
    per_rank = allocation.devices_per_rank or 1
    if any(_has_ranks_by_slots(host, devices, per_rank) for host in allocation.hosts):
        return allocation.slots_from.source if allocation.slots_from else f"slots of {allocation.source}"
    counts = {host.devices for host in allocation.hosts}
    if len(counts) > 1:
        return f"devices of each node ({devices.source})"
    if len(devices.ids) > 1:
        return f"{len(devices.ids)} devices ({devices.source})"
    return "one per node: no slots and at most one device"


def _raise_capacities(allocation: Allocation, capacities: list[int], world_size: int) -> list[int]:
    # Nodes with slots in the user's hostfile get that many ranks; the others share the remaining ranks evenly.
    fixed = [allocation.slots_are_a_limit and host.slots is not None for host in allocation.hosts]
    free = fixed.count(False)
    if not free:
        raise UserError(f"{world_size} ranks, but the nodes have {sum(capacities)} slots", where=allocation.source,
                        instead=f"-n {sum(capacities)}, or more slots in the hostfile")
    remaining = world_size - sum(count for count, is_fixed in zip(capacities, fixed, strict=True) if is_fixed)
    even = -(-remaining // free)
    return [count if is_fixed else even for count, is_fixed in zip(capacities, fixed, strict=True)]


def _fill(capacities: list[int], remaining: int) -> list[int]:
    counts = []
    for capacity in capacities:
        counts.append(min(capacity, remaining))
        remaining -= counts[-1]
    return counts


def _check_slots(allocation: Allocation, counts: list[int]) -> None:
    if not allocation.slots_are_a_limit:
        return
    for host, count in zip(allocation.hosts, counts, strict=True):
        if host.slots is not None and count > host.slots:
            raise UserError(f"{count} ranks for {host.name}, which has {count_noun(host.slots, 'slot')}",
                            where=allocation.source, instead=f"--ppn {host.slots}, or more slots in the hostfile")


class RankPlace(NamedTuple):
    """Node, cores and device of a rank; None for values that are unknown before ranks start.

    Attributes:
        domains: NUMA domains of `cores`.
        distance: distance from `cores` to `device`.
    """

    rank: int
    host: str
    local_rank: int
    cores: str | None = None
    domains: str | None = None
    device: str | None = None
    distance: str | None = None


class RankTable(Sequence[RankPlace]):
    """Sequence of all ranks, computed on access: there may be 100,000 of them."""

    def __init__(self, placement: Placement, binding: Binding) -> None:
        self._hosts = [name for name, _ in placement.ranks]
        self._ends = list(accumulate(count for _, count in placement.ranks))
        columns = (binding.cores, binding.domains, binding.devices, binding.distances)
        self._columns_by_local_rank = [tuple(column[local_rank] if column else None for column in columns)
                                       for local_rank in range(placement.most)]

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> RankPlace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankPlace, ...]: ...

    def __getitem__(self, index: int | slice) -> RankPlace | tuple[RankPlace, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        rank = index % len(self)
        host = bisect_right(self._ends, rank)
        return self._place(rank, self._hosts[host], rank - (self._ends[host - 1] if host else 0))

    def __iter__(self) -> Iterator[RankPlace]:
        rank = 0
        for host, end in zip(self._hosts, self._ends, strict=True):
            first = rank
            for rank in range(first, end):
                yield self._place(rank, host, rank - first)
            rank = end

    def _place(self, rank: int, host: str, local_rank: int) -> RankPlace:
        return RankPlace(rank, host, local_rank, *self._columns_by_local_rank[local_rank])
