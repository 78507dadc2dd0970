"""Selection of nodes by --hostfile, --hosts, and --nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.launcher.basics.hostlist import ACCEPTED, expand_hostlist
from ezpz_llm.launcher.basics.hostnames import NodeNames, ambiguous_name_error, match_names, node_keys
from ezpz_llm.launcher.jobs.hostfile import parse, read
from ezpz_llm.launcher.jobs.schedulers import local, scheduler_of
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Node, Origin, Place

_MAX_NAMES = 8


def select_nodes(allocation: Allocation, nodes: int | None, hosts: str | None, hostfile: Path | None) -> Allocation:
    """Reduce `allocation` to the nodes in `hostfile`, then to those in `hosts`, then to the first `nodes`.

    Hostnames are compared by `launch.hostnames`, and keep the scheduler's spelling. Without a scheduler, the file
    or the list defines the nodes. In a process that is already a rank, the options are ignored with a note.

    Raises:
        UserError: a node is not in the allocation, the allocation has fewer than `nodes` nodes, or the file or
            list is invalid.
    """
    selections = [f"{option} {value}" for option, value in
                  (("--hostfile", hostfile), ("--hosts", hosts), ("--nodes", nodes)) if value is not None]
    if allocation.scheduler == local.STARTED:
        note = f"ignoring {', '.join(selections)}: this process is already a rank"
        return allocation.with_notes(note) if selections else allocation
    if hostfile is not None:
        allocation = _select_by_file(allocation, hostfile)
    if hosts is not None:
        defines_nodes = hostfile is None and allocation.scheduler == local.NAME
        allocation = _select_by_list(allocation, hosts, defines_nodes=defines_nodes)
    if nodes is not None:
        if nodes > len(allocation.hosts):
            raise UserError(f"--nodes {nodes}, but the allocation has "
                            f"{count_noun(len(allocation.hosts), 'node')}: "
                            f"{_names(allocation.hosts)}", where=allocation.source,
                            instead=f"--nodes {len(allocation.hosts)} or less")
        allocation = allocation._replace(hosts=allocation.hosts[:nodes])
    return allocation


def _select_by_file(allocation: Allocation, path: Path) -> Allocation:
    hosts = read(path)
    source = f"--hostfile {path}"
    has_slots = any(host.slots is not None for host in hosts)
    if allocation.scheduler != local.NAME:
        selected, allocation = _find_nodes(allocation, [host.name for host in hosts], source)
        if has_slots:
            selected = [host._replace(slots=entry.slots, slots_count_cores=False)
                        for host, entry in zip(selected, hosts, strict=True)]
        selected, allocation = _order_nodes(allocation, selected)
        hosts = tuple(selected)
    slots_from = Origin(f"slots of {source}", Place.USER) if has_slots else allocation.slots_from
    return allocation._replace(hosts=hosts, source=source, slots_are_a_limit=has_slots, slots_from=slots_from)


def _select_by_list(allocation: Allocation, text: str, *, defines_nodes: bool) -> Allocation:
    try:
        names = expand_hostlist(text)
    except UserError as error:
        raise UserError(error.found, where=f"--hosts {text}", instead=ACCEPTED) from error
    if not names:
        raise UserError("--hosts lists no nodes", where=f"--hosts {text!r}", instead=f"--hosts with {ACCEPTED}")
    source = f"--hosts {text}"
    listed_keys: set[str] = set()
    for key, name in zip(node_keys(names, source), names, strict=True):
        if key in listed_keys:
            raise UserError(f"{name} is listed twice", where=source,
                            instead="list it once; --ppn sets the number of ranks per node")
        listed_keys.add(key)
    if defines_nodes:
        parse("\n".join(names), source)
        return allocation._replace(hosts=tuple(Node(name) for name in names), source=source)
    selected, allocation = _find_nodes(allocation, names, source)
    selected, allocation = _order_nodes(allocation, selected)
    return allocation._replace(hosts=tuple(selected), source=f"{source} of {allocation.source}")


def _find_nodes(allocation: Allocation, names: Sequence[str], source: str) -> tuple[list[Node], Allocation]:
    """Return the nodes for `names`, and the allocation with a note if a name matches only without its domain."""
    hostnames = [host.name for host in allocation.hosts]
    matches = match_names(names, hostnames)
    unknown_nodes = [name for name, position in zip(names, matches.places, strict=True) if position is None]
    if unknown_nodes:
        if several := NodeNames(hostnames).find(unknown_nodes[0]):
            raise ambiguous_name_error(unknown_nodes[0], [hostnames[position] for position in several],
                                       f"{source}; {allocation.source}")
        job = f"{allocation.scheduler} job {allocation.job_id}" if allocation.job_id else allocation.source
        subject = f"{', '.join(unknown_nodes[:_MAX_NAMES])} {'is' if len(unknown_nodes) == 1 else 'are'}"
        raise UserError(f"{subject} not in {job}, which has {_names(allocation.hosts)}",
                        where=f"{source}; {allocation.source}",
                        instead="nodes of the allocation, or --scheduler none to ignore it")
    selected = [allocation.hosts[position] for position in matches.places if position is not None]
    return selected, allocation.with_notes(*matches.notes(source, allocation.source))


def _order_nodes(allocation: Allocation, selected: list[Node]) -> tuple[list[Node], Allocation]:
    """Return the nodes in the scheduler's order, with a note if the user's order differs."""
    scheduler = scheduler_of(allocation)
    if scheduler is None or not scheduler.KEEPS_NODE_ORDER:
        return selected, allocation
    position = {host.name: number for number, host in enumerate(allocation.hosts)}
    ordered = sorted(selected, key=lambda host: position[host.name])
    if ordered != selected:
        allocation = allocation.with_notes(f"{scheduler.TITLE} numbers nodes in the job's order: rank 0 is on "
                                           f"{ordered[0].name}, not on {selected[0].name}")
    return ordered, allocation


def _names(hosts: Sequence[Node]) -> str:
    more = f", … ({len(hosts)} in total)" if len(hosts) > _MAX_NAMES else ""
    return ", ".join(host.name for host in hosts[:_MAX_NAMES]) + more
