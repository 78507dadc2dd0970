"""Devices and cores of the ranks of an allocation, and the notes about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ezpz_llm.core.base import count_noun
from ezpz_llm.launcher.basics.devices import MASKS, Devices, has_no_accelerator, visible_devices
from ezpz_llm.launcher.basics.node_variables import has_uuids
from ezpz_llm.launcher.jobs.schedulers import is_set_by_scheduler, scheduler_of
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Origin, Place
from ezpz_llm.launcher.planning.binding.core_binding import (
    COUNTING,
    BindingInputs,
    are_ranks_near_in_order,
    choose_binding,
    device_order,
)
from ezpz_llm.launcher.planning.binding.topology import Topology, site_topology, system_topology
from ezpz_llm.launcher.planning.dialects.work import Launcher
from ezpz_llm.launcher.planning.placement import Placement, devices_per_rank
from ezpz_llm.launcher.planning.rank_binding import Binding, CoreOption
from ezpz_llm.launcher.planning.sites import Site, requests_devices

_UNKNOWN = "the nodes' devices are unknown here"


def devices_of_nodes(env: Mapping[str, str], site: Site, allocation: Allocation,
                     is_here_in_allocation: bool) -> tuple[Devices, Allocation]:
    """Return the accelerators of a node, and the allocation with the number of devices of each node.

    Precedence:
        1. a device mask that the user set: the choice holds for all nodes;
        2. the scheduler's devices of each node;
        3. a mask that the scheduler set, or the drivers: they describe only this node. If it is in the job, the
           other nodes are assumed to have as many devices;
        4. the site file, unless this node has no accelerator, or the site's jobs request devices and this one did
           not.
    """
    visible = visible_devices(env)
    is_mask, granted = visible.source in MASKS, any(host.devices for host in allocation.hosts)
    is_own_mask = is_mask and is_set_by_scheduler(visible.source, env)
    if is_mask and not is_own_mask:
        return visible, _limit_devices(allocation, len(visible.ids), Origin(visible.source, Place.USER))
    if is_own_mask and (allocation.step_id or not granted):
        # The devices of a step are those that were requested for it, even if the job has more.
        origin = Origin(visible.source, Place.STEP if allocation.step_id else Place.NODE)
        return visible, _set_devices(allocation, len(visible.ids), origin)
    if granted and allocation.devices_from:
        maximum = max(host.devices or 0 for host in allocation.hosts)
        if len(visible.ids) == maximum and is_here_in_allocation:
            return visible, allocation
        return Devices(tuple(map(str, range(maximum))), allocation.devices_from.source), allocation
    # The scheduler does not manage devices, or this job has none, so that no step can request them.
    if is_here_in_allocation and (visible.ids or site.devices_per_host is None or has_no_accelerator(env)):
        return visible, _set_devices(allocation, None, Origin(visible.source, Place.NODE))
    if site.devices_per_host is None:
        return Devices((), _UNKNOWN), _set_devices(allocation, None, None)
    if allocation.devices_from and requests_devices(site):
        return Devices((), allocation.devices_from.source), _set_devices(allocation, None, allocation.devices_from)
    origin = Origin(f"site {site.name}", Place.SITE)
    return (Devices(tuple(map(str, range(site.devices_per_host))), origin.source),
            _set_devices(allocation, None, origin))


def _set_devices(allocation: Allocation, devices: int | None, origin: Origin | None) -> Allocation:
    hosts = tuple(host._replace(devices=devices) for host in allocation.hosts)
    return allocation._replace(hosts=hosts, devices_from=origin)


def _limit_devices(allocation: Allocation, devices: int, origin: Origin) -> Allocation:
    """Return the allocation with at most `devices` on each node, as far as the scheduler's number is known."""
    if not any(host.devices for host in allocation.hosts):
        return _set_devices(allocation, None, origin)
    hosts = tuple(host._replace(devices=min(host.devices or 0, devices)) for host in allocation.hosts)
    return allocation._replace(hosts=hosts, devices_from=origin)


def device_notes(placement: Placement, devices: Devices, allocation: Allocation) -> tuple[str, ...]:
    """Return notes about idle devices and about ranks that share a device."""
    devices_of = {host.name: len(devices.ids) if host.devices is None else host.devices
                  for host in allocation.hosts}
    per_rank = devices_per_rank(allocation, placement) or 1
    idle = [(host, devices_of[host], count) for host, count in placement.ranks
            if count < devices_of[host] // per_rank]
    shared = [(host, devices_of[host], count) for host, count in placement.ranks if count > devices_of[host] > 0]
    notes = []
    if idle:
        host, total, count = idle[0]
        advice = _advise(allocation, placement, {devices_of[name] // per_rank for name, _ in placement.ranks})
        notes.append(f"IDLE DEVICES: {count_noun(count, 'rank')} for the {total} devices of {host}{_more(idle)};"
                     f" {advice} uses all ({devices.source})")
    if shared:
        host, total, count = shared[0]
        advice = _advise(allocation, placement, {devices_of[name] for name, _ in placement.ranks})
        notes.append(f"{count} ranks for the {count_noun(total, 'device')} of {host}{_more(shared)}:"
                     f" some ranks share a device or have none; {advice} starts one rank per device"
                     f" ({devices.source})")
    return tuple(notes)


def _advise(allocation: Allocation, placement: Placement, shares: set[int]) -> str:
    """Return what to change for the ranks per node in `shares`."""
    if allocation.slots_are_a_limit:
        return "a hostfile with slots for each device"
    if len(shares) > 1:
        return f"omitting {placement.source}" if placement.source in ("-n", "--ppn") else "a hostfile with slots"
    return f"--ppn {shares.pop()}"


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
    # UUIDs are this node's, and the plan shows one binding for all nodes.
    is_unknown = by_launcher or (len(placement.ranks) > 1 and has_uuids(",".join(devices.ids)))
    order = () if is_unknown else mask or devices.ids
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
