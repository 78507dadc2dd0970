"""Which hosts of a reservation --hostfile, --hosts and --nodes select, and the format of hostfiles; how many ranks
each host gets, by whose word, and the table of where each runs."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import overload

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import read_text
from ezpz_llm.base.schema import MOST_HOSTS, MOST_RANKS_ON_A_HOST
from ezpz_llm.launch.binding.choose import Binding
from ezpz_llm.launch.devices import Devices
from ezpz_llm.launch.hostlist import ACCEPTED, count_repeats, expand_hosts, short_name
from ezpz_llm.launch.schedulers import local, scheduler_of
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host

_SHOWN = 8


def narrow(allocation: Allocation, nodes: int | None, hosts: str | None, hostfile: Path | None) -> Allocation:
    """`allocation` with the hosts of `hostfile` only, of those the ones that `hosts` names, of those the first
    `nodes`. Hosts are compared by short name and keep the reservation's spelling.

    Without a reservation, the hosts of the file or the list are taken as they are written. In a rank that is
    running already there is nothing to choose: the options are named in a note.

    Raises:
        UserError: a host outside the reservation, more nodes than there are, an unreadable file or list.
    """
    given = [f"{option} {value}" for option, value in
             (("--hostfile", hostfile), ("--hosts", hosts), ("--nodes", nodes)) if value is not None]
    if allocation.scheduler == local.STARTED:
        return allocation.noting(f"{', '.join(given)} says nothing here") if given else allocation
    if hostfile is not None:
        allocation = _by_file(allocation, hostfile)
    if hosts is not None:
        allocation = _by_list(allocation, hosts, is_open=hostfile is None and allocation.scheduler == local.NAME)
    if nodes is not None:
        if nodes > len(allocation.hosts):
            raise UserError(f"--nodes {nodes}, but there are {len(allocation.hosts)} hosts: "
                            f"{_names(allocation.hosts)}", where=allocation.source,
                            instead=f"--nodes {len(allocation.hosts)} or less")
        allocation = replace(allocation, hosts=allocation.hosts[:nodes])
    return allocation


def _by_file(allocation: Allocation, path: Path) -> Allocation:
    wanted = read(path)
    source = f"--hostfile {path}"
    has_slots = any(host.slots is not None for host in wanted)
    if allocation.scheduler != local.NAME:
        found = _members(allocation, [host.name for host in wanted], source)
        if has_slots:
            found = [replace(host, slots=asked.slots) for host, asked in zip(found, wanted, strict=True)]
        found, allocation = _in_order(allocation, found)
        wanted = tuple(found)
    return replace(allocation, hosts=wanted, source=source, slots_are_a_limit=has_slots)


def _by_list(allocation: Allocation, text: str, *, is_open: bool) -> Allocation:
    try:
        names = expand_hosts(text)
    except UserError as error:
        raise UserError(error.found, where=f"--hosts {text}", instead=ACCEPTED) from error
    if not names:
        raise UserError("--hosts names no host", where=f"--hosts {text!r}", instead=f"--hosts with {ACCEPTED}")
    source = f"--hosts {text}"
    seen: set[str] = set()
    for name in names:
        if short_name(name) in seen:
            raise UserError(f"host {name} is named twice", where=source,
                            instead="name it once; --ppn gives ranks a host")
        seen.add(short_name(name))
    if is_open:
        parse("\n".join(names), source)
        return replace(allocation, hosts=tuple(Host(name) for name in names), source=source)
    found, allocation = _in_order(allocation, _members(allocation, names, source))
    return replace(allocation, hosts=tuple(found), source=f"{source} of {allocation.source}")


def _members(allocation: Allocation, names: Sequence[str], source: str) -> list[Host]:
    """The reservation's own entries for `names`."""
    known = {short_name(host.name): host for host in allocation.hosts}
    strangers = [name for name in names if short_name(name) not in known]
    if strangers:
        job = f"{allocation.scheduler} job {allocation.job_id}" if allocation.job_id else allocation.source
        raise UserError(f"{', '.join(strangers[:_SHOWN])} {'is' if len(strangers) == 1 else 'are'} not in {job}, "
                        f"which has {_names(allocation.hosts)}", where=f"{source}; {allocation.source}",
                        instead="hosts of the reservation, or --scheduler none to leave it aside")
    return [known[short_name(name)] for name in names]


def _in_order(allocation: Allocation, found: list[Host]) -> tuple[list[Host], Allocation]:
    """The hosts in the order in which the scheduler numbers them, which is noted where it is another."""
    scheduler = scheduler_of(allocation)
    if scheduler is None or not scheduler.KEEPS_HOST_ORDER:
        return found, allocation
    place = {host.name: number for number, host in enumerate(allocation.hosts)}
    ordered = sorted(found, key=lambda host: place[host.name])
    if ordered != found:
        allocation = allocation.noting(f"{scheduler.TITLE} numbers hosts in the job's order: ranks begin on "
                                       f"{ordered[0].name}, not on {found[0].name}")
    return ordered, allocation


def _names(hosts: Sequence[Host]) -> str:
    more = f", … ({len(hosts)} in all)" if len(hosts) > _SHOWN else ""
    return ", ".join(host.name for host in hosts[:_SHOWN]) + more


# Hostfiles: one host a line.
HOSTFILE_ACCEPTED = "one host a line: `host`, `host slots=N` or `host:N` (N ranks, 1 or more); # starts a comment"

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)(?P<slots>[1-9][0-9]{0,8}))?")


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of the file, in its order.

    Raises:
        UserError: the file is missing, unreadable or empty, or a line is none of the accepted forms.
    """
    try:
        text = read_text(path)
    except UserError as error:
        raise UserError(f"cannot read the hostfile: {error.found}", where=str(path),
                        instead=HOSTFILE_ACCEPTED) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> tuple[Host, ...]:
    """The hosts named in `text`. A plain name repeated counts as slots, as in a PBS node file.

    Raises:
        UserError: with `where`, the line's number and its text.
    """
    plain: list[str] = []
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise UserError(f"not a hostfile line: {line.strip()!r}", where=f"{where}, line {number}",
                            instead=HOSTFILE_ACCEPTED)
        name, count = match["name"], match["slots"]
        key = short_name(name)
        if key in lines and (count or key in slots):
            raise UserError(f"host {name} is named twice, once with its slots: {line.strip()!r}",
                            where=f"{where}, line {number} (before: line {lines[key]})",
                            instead="name it once, with all its slots")
        lines.setdefault(key, number)
        plain.append(name)
        if count:
            slots[key] = int(count)
    if len(lines) > MOST_HOSTS:
        raise UserError(f"the hostfile names {len(lines):,} hosts", where=where, instead=f"{MOST_HOSTS:,} at most")
    if not plain:
        raise UserError("the hostfile names no host", where=where, instead=HOSTFILE_ACCEPTED)
    return tuple(Host(name, slots=slots.get(short_name(name), repeats if repeats > 1 else None))
                 for name, repeats in count_repeats(plain).items())


# How many ranks each host gets.
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
        """Whether all hosts have equally many ranks."""
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
            raise UserError(f"{ranks} ranks do not fit on {len(hosts)} host(s) with {per_host} a host",
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
        return f"slots of {allocation.source}"
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
            raise UserError(f"{count} ranks for host {host.name}, which has {host.slots} slot(s)",
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
