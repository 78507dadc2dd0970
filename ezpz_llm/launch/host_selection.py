"""Nodes of a reservation that --hostfile, --hosts and --nodes select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.base import UserError
from ezpz_llm.launch.hostfile import parse, read
from ezpz_llm.launch.hostlist import ACCEPTED, expand_hosts
from ezpz_llm.launch.hostnames import NodeNames, match_names, node_keys, several_matches
from ezpz_llm.launch.schedulers import local, scheduler_of
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host

_SHOWN = 8


def select_hosts(allocation: Allocation, nodes: int | None, hosts: str | None, hostfile: Path | None) -> Allocation:
    """`allocation` with the hosts of `hostfile` only, of those the ones that `hosts` names, of those the first
    `nodes`. Hostnames are compared as `launch.hostnames` does, and keep the reservation's spelling.

    Without a reservation, the hosts of the file or the list are taken as they are written. In a rank that is
    running already there is nothing to choose: the options are named in a note.

    Raises:
        UserError: a host outside the reservation, more nodes than there are, an unreadable file or list.
    """
    given = [f"{option} {value}" for option, value in
             (("--hostfile", hostfile), ("--hosts", hosts), ("--nodes", nodes)) if value is not None]
    if allocation.scheduler == local.STARTED:
        return allocation.with_notes(f"{', '.join(given)} says nothing here") if given else allocation
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
        found, allocation = _members(allocation, [host.name for host in wanted], source)
        if has_slots:
            found = [replace(host, slots=asked.slots) for host, asked in zip(found, wanted, strict=True)]
        found, allocation = _in_order(allocation, found)
        wanted = tuple(found)
    slots_source = "" if has_slots else allocation.slots_source
    return replace(allocation, hosts=wanted, source=source, slots_are_a_limit=has_slots, slots_source=slots_source)


def _by_list(allocation: Allocation, text: str, *, is_open: bool) -> Allocation:
    try:
        names = expand_hosts(text)
    except UserError as error:
        raise UserError(error.found, where=f"--hosts {text}", instead=ACCEPTED) from error
    if not names:
        raise UserError("--hosts names no host", where=f"--hosts {text!r}", instead=f"--hosts with {ACCEPTED}")
    source = f"--hosts {text}"
    seen: set[str] = set()
    for key, name in zip(node_keys(names, source), names, strict=True):
        if key in seen:
            raise UserError(f"host {name} is named twice", where=source,
                            instead="name it once; --ppn gives ranks a host")
        seen.add(key)
    if is_open:
        parse("\n".join(names), source)
        return replace(allocation, hosts=tuple(Host(name) for name in names), source=source)
    found, allocation = _members(allocation, names, source)
    found, allocation = _in_order(allocation, found)
    return replace(allocation, hosts=tuple(found), source=f"{source} of {allocation.source}")


def _members(allocation: Allocation, names: Sequence[str], source: str) -> tuple[list[Host], Allocation]:
    """The reservation's own entries for `names`, and the reservation with a note where domains differ."""
    hostnames = [host.name for host in allocation.hosts]
    matches = match_names(names, hostnames)
    unknown_hosts = [name for name, place in zip(names, matches.places, strict=True) if place is None]
    if unknown_hosts:
        if several := NodeNames(hostnames).find(unknown_hosts[0]):
            raise several_matches(unknown_hosts[0], [hostnames[place] for place in several],
                                  f"{source}; {allocation.source}")
        job = f"{allocation.scheduler} job {allocation.job_id}" if allocation.job_id else allocation.source
        shown = f"{', '.join(unknown_hosts[:_SHOWN])} {'is' if len(unknown_hosts) == 1 else 'are'}"
        raise UserError(f"{shown} not in {job}, which has {_names(allocation.hosts)}",
                        where=f"{source}; {allocation.source}",
                        instead="hosts of the reservation, or --scheduler none to leave it aside")
    found = [allocation.hosts[place] for place in matches.places if place is not None]
    return found, allocation.with_notes(*matches.notes(source, allocation.source))


def _in_order(allocation: Allocation, found: list[Host]) -> tuple[list[Host], Allocation]:
    """The hosts in the order in which the scheduler numbers them, which is noted where it is another."""
    scheduler = scheduler_of(allocation)
    if scheduler is None or not scheduler.KEEPS_HOST_ORDER:
        return found, allocation
    place = {host.name: number for number, host in enumerate(allocation.hosts)}
    ordered = sorted(found, key=lambda host: place[host.name])
    if ordered != found:
        allocation = allocation.with_notes(f"{scheduler.TITLE} numbers hosts in the job's order: ranks begin on "
                                           f"{ordered[0].name}, not on {found[0].name}")
    return ordered, allocation


def _names(hosts: Sequence[Host]) -> str:
    more = f", … ({len(hosts)} in all)" if len(hosts) > _SHOWN else ""
    return ", ".join(host.name for host in hosts[:_SHOWN]) + more
