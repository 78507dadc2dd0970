"""Devices and cores of the ranks of an allocation, and the notes about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ezpz_llm.base import count_noun
from ezpz_llm.launch.addresses import find_local_node
from ezpz_llm.launch.binding.core_binding import (
    COUNTING,
    BindingInputs,
    are_ranks_near_in_order,
    choose_binding,
    device_order,
)
from ezpz_llm.launch.binding.rank_binding import Binding, CoreOption
from ezpz_llm.launch.binding.topology import Topology, site_topology, system_topology
from ezpz_llm.launch.devices import MASKS, Devices, visible_devices
from ezpz_llm.launch.dialects.work import Launcher
from ezpz_llm.launch.placement import Placement
from ezpz_llm.launch.schedulers import scheduler_of
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.launch.sites import Site


def devices_of_nodes(env: Mapping[str, str], site: Site, allocation: Allocation,
                     is_here_in_allocation: bool) -> tuple[Devices, Allocation]:
    """Return the accelerators of a node, and the allocation with the number of devices of each node.

    Precedence: a device mask in `env` whose length differs from the scheduler's number of devices, since the user
    chose it for all nodes; the scheduler's devices; the visible devices if this node is in the job; the site file.
    """
    visible = visible_devices(env)
    maximum = max((host.devices or 0 for host in allocation.hosts), default=0)
    position = find_local_node([host.name for host in allocation.hosts]) if maximum else None
    local_count = None if position is None else allocation.hosts[position].devices
    expected = maximum if local_count is None else local_count
    if maximum and (visible.source not in MASKS or len(visible.ids) == expected):
        if len(visible.ids) == maximum:
            return visible, allocation
        return Devices(tuple(map(str, range(maximum))), allocation.devices_source), allocation
    if maximum:
        allocation = replace(allocation, hosts=tuple(replace(host, devices=None) for host in allocation.hosts))
    if site.devices_per_host is None or visible.source in MASKS or (is_here_in_allocation and visible.ids):
        return visible, allocation
    return Devices(tuple(map(str, range(site.devices_per_host))), f"site {site.name}"), allocation


def device_notes(placement: Placement, devices: Devices, allocation: Allocation) -> tuple[str, ...]:
    """Return notes about idle devices and about ranks that share a device."""
    devices_of = {host.name: len(devices.ids) if host.devices is None else host.devices
                  for host in allocation.hosts}
    idle = [(host, devices_of[host], count) for host, count in placement.ranks if count < devices_of[host]]
    shared = [(host, devices_of[host], count) for host, count in placement.ranks if count > devices_of[host] > 0]
    notes = []
    if idle:
        host, total, count = idle[0]
        notes.append(f"IDLE DEVICES: {count_noun(count, 'rank')} for the {total} devices of {host}{_more(idle)};"
                     f" --ppn {total} uses all ({devices.source})")
    if shared:
        host, total, count = shared[0]
        notes.append(f"{count} ranks for the {count_noun(total, 'device')} of {host}{_more(shared)}:"
                     f" some ranks share a device or have none; --ppn {total} starts one rank per device"
                     f" ({devices.source})")
    return tuple(notes)


def _more(nodes: Sequence[object]) -> str:
    return f" (and {count_noun(len(nodes) - 1, 'more node')})" if len(nodes) > 1 else ""


def site_notes(site: Site, allocation: Allocation, devices: Devices, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes about obsolete and missing keys of the site file, and where it does not match this job."""
    notes = list(site.notes)
    if scheduler := scheduler_of(allocation):
        notes += scheduler.site_notes(env, site.env)
    if site.scheduler and allocation.job_id and allocation.scheduler != site.scheduler:
        notes.append(f"site {site.name} has {site.scheduler}, but this is a job of {allocation.scheduler}")
    count = site.devices_per_host
    if count and devices.source not in MASKS and len(devices.ids) != count:
        notes.append(f"this node has {count_noun(len(devices.ids), 'device')} ({devices.source}), but nodes of site"
                     f" {site.name} have {count}")
    return tuple(notes)


def bind_ranks(wanted: str, site: Site, allocation: Allocation, placement: Placement, launcher: Launcher,
               devices: Devices, is_here_in_allocation: bool) -> tuple[Binding, tuple[str, ...], tuple[str, ...]]:
    """Choose the binding of the ranks of a node.

    Returns:
        The binding; the order in which ranks see the devices, empty for the system's order; and notes on ranks that
        are not near their device.
    """
    dialect = launcher.dialect
    # Slurm overwrites the device mask of each task.
    is_fixed = devices.source in MASKS or dialect.cores is CoreOption.SCHEDULER
    topology = _topology(site, devices, is_here_in_allocation, dialect.cores)
    mask: tuple[str, ...] = ()
    if site.binding == "depth" and dialect.cores in COUNTING and not is_fixed:
        mask = _spread_devices(devices.ids, device_order(devices.ids, topology), placement.most)
    by_launcher = any(word.startswith(dialect.device_options) for word in site.options.get(launcher.kind, ()))
    order = () if by_launcher else mask or devices.ids
    inputs = BindingInputs(
        ranks=placement.most,
        hosts=len(placement.ranks),
        launcher=dialect.title if launcher.kind == "mpiexec" else launcher.kind,
        option=dialect.cores,
        topology=topology,
        allotted=_allotted(allocation, placement, site),
        devices=tuple(_device(order, local_rank) for local_rank in range(placement.most)),
        is_mask_fixed=is_fixed,
    )
    binding = choose_binding(wanted, site, inputs)
    return binding, mask, _distance_notes(binding, inputs)


def _distance_notes(binding: Binding, inputs: BindingInputs) -> tuple[str, ...]:
    distant = [(rank, distance) for rank, distance in enumerate(binding.distances)
               if distance not in (None, "near")]
    if distant:
        rank, distance = distant[0]
        where = "on another socket" if distance == "far" else "in another NUMA domain of the same socket"
        return (f"{len(distant)} of {count_noun(inputs.ranks, 'rank')} of a node are not near their device:"
                f" local rank {rank} has cores {binding.cores[rank]}, but"
                f" device {binding.devices[rank]} is {where}",)
    if binding.kind == "depth" and not binding.cores and not are_ranks_near_in_order(inputs):
        return (f"{inputs.launcher} assigns cores in order, so that some ranks are not near their device: set "
                'binding = "list" in the site file to assign them by device_domains',)
    return ()


def _topology(site: Site, devices: Devices, is_here_in_allocation: bool, option: CoreOption) -> Topology | None:
    # srun's ranks are not limited to the cores of the process that starts srun.
    uses_site_cores = bool(site.cores) and option is CoreOption.SCHEDULER
    if is_here_in_allocation and not uses_site_cores and (topology := system_topology(site, devices)):
        return topology
    return site_topology(site) if site.cores else None


def _allotted(allocation: Allocation, placement: Placement, site: Site) -> int | None:
    """Return the CPUs that the scheduler allocated per node; None if unknown.

    Launchers accept a single number of CPUs per rank. So if nodes differ, or only some are known, the result is the
    smallest share of a rank times the ranks of the fullest node.
    """
    scheduler = scheduler_of(allocation)
    if scheduler and scheduler.SITE_CORES_COUNT and site.cores:
        return None
    known_cores = _cores_and_ranks(allocation, placement)
    if not known_cores:
        return None
    if len(known_cores) == len(placement.ranks) and len({cores for _, cores, _ in known_cores}) == 1:
        return known_cores[0][1]
    share = min(cores // ranks for _, cores, ranks in known_cores)
    return share * placement.most or min(cores for _, cores, ranks in known_cores if cores < ranks)


def _cores_and_ranks(allocation: Allocation, placement: Placement) -> list[tuple[str, int, int]]:
    cores = {host.name: host.cores for host in allocation.hosts}
    return [(host, count, ranks) for host, ranks in placement.ranks if (count := cores[host])]


def core_notes(allocation: Allocation, placement: Placement, binding: Binding) -> tuple[str, ...]:
    """Return a note if nodes have different numbers of CPUs per rank."""
    known_cores = _cores_and_ranks(allocation, placement)
    shares = {cores // ranks: (host, cores, ranks) for host, cores, ranks in known_cores}
    if len(shares) < 2 or not min(shares) or binding.cpus_per_rank is None:
        return ()
    lowest_host, lowest_cores, lowest_ranks = shares[min(shares)]
    highest_host, highest_cores, highest_ranks = shares[max(shares)]
    return (f"nodes differ: {count_noun(lowest_cores, 'CPU')} for {count_noun(lowest_ranks, 'rank')} on"
            f" {lowest_host}, {highest_cores} for {highest_ranks} on {highest_host}; every rank gets"
            f" {binding.cpus_per_rank}",)


def _spread_devices(ids: Sequence[str], order: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return all devices of `order`, first those of the local ranks, which are at even distances in `order`.

    Return () if `order` is the order of `ids`.
    """
    if tuple(order) == tuple(ids):
        return ()
    first = [order[len(ids) * rank // ranks] for rank in range(ranks)] if ranks < len(ids) else order
    return (*first, *(device for device in order if device not in first))


def _device(ids: Sequence[str], local_rank: int) -> str | None:
    if len(ids) == 1:
        return ids[0]
    return ids[local_rank] if local_rank < len(ids) else None
