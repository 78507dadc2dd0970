"""Placement of ranks: how many each node gets, by whose word, and the table of where each runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import overload

from ezpz_llm.base import MOST_RANKS_ON_A_HOST, UserError, counted
from ezpz_llm.launch.binding.choose import Binding
from ezpz_llm.launch.devices import Devices
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host


@dataclass(frozen=True)
class Placement:
    """Ranks a host, for the hosts that get any, in the order in which ranks are numbered."""

    ranks: tuple[tuple[str, int], ...]
    source: str

    # Asked for once a host by some: computed once.
    @cached_property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return sum(count for _, count in self.ranks)

    @cached_property
    def most(self) -> int:
        """The largest number of ranks on any host."""
        return max(count for _, count in self.ranks)

    @cached_property
    def uniform(self) -> bool:
        """True if all hosts have equally many ranks."""
        return len({count for _, count in self.ranks}) == 1


def place(allocation: Allocation, devices: Devices, ranks: int | None, per_host: int | None) -> Placement:
    """Ranks a host by, in this order: `ranks` and `per_host` as the user typed them (-n, --ppn); slots that the
    reservation or the hostfile asks for; `devices`, the visible ones or the site's, where there are several; one.

    With `ranks` alone, hosts are filled in order by the same rule if that suffices, else evenly.

    Raises:
        UserError: more ranks than --ppn or a hostfile's slots leave room for.
    """
    hosts = allocation.hosts
    if per_host is not None:
        wanted = per_host * len(hosts) if ranks is None else ranks
        if wanted > per_host * len(hosts):
            raise UserError(f"{ranks} ranks do not fit on {counted(len(hosts), 'host')} with {per_host} a host",
                            where=f"-n {ranks} --ppn {per_host}",
                            instead=f"-n {per_host * len(hosts)}, or a larger --ppn")
        room, source = [per_host] * len(hosts), "--ppn"
    else:
        room = [_natural(host, devices) for host in hosts]
        source = _natural_source(allocation, devices)
        wanted = sum(room) if ranks is None else ranks
        if ranks is not None:
            source = "-n"
        if wanted > sum(room):
            room = _widened(allocation, room, wanted)
    counts = _fill(room, wanted)
    if max(counts) > MOST_RANKS_ON_A_HOST:
        raise UserError(f"{max(counts)} ranks on one host are more than it can run", where=source,
                        instead=f"{MOST_RANKS_ON_A_HOST} or fewer a host")
    _check_slots(allocation, counts)
    return Placement(tuple((host.name, count) for host, count in zip(hosts, counts, strict=True) if count), source)


def _natural(host: Host, devices: Devices) -> int:
    own = len(devices.ids) if host.devices is None else host.devices
    return max(1, own) if host.slots is None else host.slots


def _natural_source(allocation: Allocation, devices: Devices) -> str:
    if any(host.slots is not None for host in allocation.hosts):
        return allocation.slots_source or f"slots of {allocation.source}"
    counts = {host.devices for host in allocation.hosts}
    if len(counts) > 1:
        return f"each host's devices ({devices.source})"
    if len(devices.ids) > 1:
        return f"{len(devices.ids)} devices ({devices.source})"
    return "one a host: no slots and no more than one device"


def _widened(allocation: Allocation, room: list[int], wanted: int) -> list[int]:
    # Hosts whose slots the user's hostfile states keep to them; the others share what is left evenly.
    fixed = [allocation.slots_are_a_limit and host.slots is not None for host in allocation.hosts]
    free = fixed.count(False)
    if not free:
        raise UserError(f"{wanted} ranks, but the hosts have slots for {sum(room)}", where=allocation.source,
                        instead=f"-n {sum(room)}, or more slots in the hostfile")
    left = wanted - sum(count for count, is_fixed in zip(room, fixed, strict=True) if is_fixed)
    even = -(-left // free)
    return [count if is_fixed else even for count, is_fixed in zip(room, fixed, strict=True)]


def _fill(room: list[int], wanted: int) -> list[int]:
    counts = []
    for space in room:
        counts.append(min(space, wanted))
        wanted -= counts[-1]
    return counts


def _check_slots(allocation: Allocation, counts: list[int]) -> None:
    if not allocation.slots_are_a_limit:
        return
    for host, count in zip(allocation.hosts, counts, strict=True):
        if host.slots is not None and count > host.slots:
            raise UserError(f"{count} ranks for host {host.name}, which has {counted(host.slots, 'slot')}",
                            where=allocation.source, instead=f"--ppn {host.slots}, or more slots in the hostfile")


# Where each rank runs. A table of 100,000 ranks is looked up, not written out.
@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs: the cores that it may run on, their NUMA domains, the accelerator that it takes, and how
    far that is from the cores; None where they cannot be told from here."""

    rank: int
    host: str
    local_rank: int
    cores: str | None = None
    domains: str | None = None
    device: str | None = None
    distance: str | None = None


class RankTable(Sequence[RankPlace]):
    """All ranks in order, made from the placement and the binding of one host."""

    def __init__(self, placement: Placement, binding: Binding) -> None:
        self._hosts = [name for name, _ in placement.ranks]
        self._ends = list(accumulate(count for _, count in placement.ranks))
        columns = (binding.cores, binding.domains, binding.devices, binding.distances)
        self._of_local_rank = [tuple(column[local_rank] if column else None for column in columns)
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
        return RankPlace(rank, host, local_rank, *self._of_local_rank[local_rank])
