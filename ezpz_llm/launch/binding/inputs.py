"""From a reservation and a site to the cores and devices of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ezpz_llm.base import counted
from ezpz_llm.launch.addresses import find_here
from ezpz_llm.launch.binding.choose import COUNTING, Binding, BindingInputs, bind, device_order, near_in_order
from ezpz_llm.launch.binding.topology import Topology, site_topology, system_topology
from ezpz_llm.launch.devices import MASKS, Devices, visible_devices
from ezpz_llm.launch.dialects.work import Launcher
from ezpz_llm.launch.placement import Placement
from ezpz_llm.launch.schedulers import scheduler_of
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.launch.sites import Site

_GIVES_DEVICES = ("--gpus-per-task", "--gpu-bind")
"""Options of srun by which it chooses each rank's device itself."""


def devices_of_hosts(env: Mapping[str, str], site: Site, allocation: Allocation,
                     is_host: bool) -> tuple[Devices, Allocation]:
    """The accelerators of a host, and the allocation with each host's own number of them.

    A mask here counts first, where it says otherwise than the scheduler: somebody has chosen, for every host alike.
    Then come what the scheduler gave, what is visible here if this is one of the hosts, and the site file."""
    visible = visible_devices(env)
    most = max((host.devices or 0 for host in allocation.hosts), default=0)
    place = find_here([host.name for host in allocation.hosts]) if most else None
    here = None if place is None else allocation.hosts[place].devices
    if most and (visible.source not in MASKS or len(visible.ids) == (most if here is None else here)):
        if len(visible.ids) == most:
            return visible, allocation
        return Devices(tuple(map(str, range(most))), allocation.devices_source), allocation
    if most:
        allocation = replace(allocation, hosts=tuple(replace(host, devices=None) for host in allocation.hosts))
    if site.devices_per_host is None or visible.source in MASKS or (is_host and visible.ids):
        return visible, allocation
    return Devices(tuple(map(str, range(site.devices_per_host))), f"site {site.name}"), allocation


def device_notes(placement: Placement, devices: Devices, allocation: Allocation) -> tuple[str, ...]:
    """Loud where ranks and devices of a host differ: devices that nobody uses, ranks without one of their own."""
    own = {host.name: len(devices.ids) if host.devices is None else host.devices for host in allocation.hosts}
    idle = [(host, own[host], count) for host, count in placement.ranks if count < own[host]]
    shared = [(host, own[host], count) for host, count in placement.ranks if count > own[host] > 0]
    notes = []
    if idle:
        host, has, count = idle[0]
        notes.append(f"IDLE DEVICES: {counted(count, 'rank')} for the {has} devices of {host}{_more(idle)};"
                     f" --ppn {has} uses all ({devices.source})")
    if shared:
        host, has, count = shared[0]
        notes.append(f"{count} ranks for the {counted(has, 'device')} of {host}{_more(shared)}:"
                     f" some share one or have none; --ppn {has} gives one to each ({devices.source})")
    return tuple(notes)


def _more(found: Sequence[object]) -> str:
    return f" (and of {len(found) - 1} more hosts alike)" if len(found) > 1 else ""


def site_notes(site: Site, allocation: Allocation, devices: Devices, env: Mapping[str, str]) -> tuple[str, ...]:
    """Where the site file contradicts what is here, or has a key that is no longer read."""
    notes = list(site.notes)
    if scheduler := scheduler_of(allocation):
        notes += scheduler.site_notes(env, site.env)
    if site.scheduler and allocation.job_id and allocation.scheduler != site.scheduler:
        notes.append(f"site {site.name} has {site.scheduler}, and this is a job of {allocation.scheduler}")
    count = site.devices_per_host
    if count and devices.source not in MASKS and len(devices.ids) != count:
        notes.append(f"{counted(len(devices.ids), 'device')} here ({devices.source}), and hosts of site"
                     f" {site.name} have {count}")
    return tuple(notes)


def bind_ranks(wanted: str, site: Site, allocation: Allocation, placement: Placement, launcher: Launcher,
               devices: Devices, is_host: bool) -> tuple[Binding, tuple[str, ...], tuple[str, ...]]:
    """The binding of the ranks of a node; the devices in the order in which ranks are to see them, where it is not
    the system's; and notes, where a rank is away from its device."""
    name = "pals" if launcher.dialect.startswith("Cray PALS") else launcher.kind
    # Slurm writes each task's mask anew.
    is_fixed = devices.source in MASKS or launcher.kind == "srun"
    topology = _topology(site, devices, is_host, name)
    mask: tuple[str, ...] = ()
    if site.binding == "depth" and name in COUNTING and not is_fixed:
        mask = _order(devices.ids, device_order(devices.ids, topology), placement.most)
    by_launcher = any(word.startswith(_GIVES_DEVICES) for word in site.options.get(launcher.kind, ()))
    order = () if by_launcher else mask or devices.ids
    around = BindingInputs(
        ranks=placement.most,
        hosts=len(placement.ranks),
        launcher=name,
        topology=topology,
        allotted=_allotted(allocation, placement, site),
        devices=tuple(_device(order, local_rank) for local_rank in range(placement.most)),
        is_mask_fixed=is_fixed,
    )
    binding = bind(wanted, site, around)
    return binding, mask, _distance_notes(binding, around)


def _distance_notes(binding: Binding, around: BindingInputs) -> tuple[str, ...]:
    away = [(rank, distance) for rank, distance in enumerate(binding.distances) if distance not in (None, "near")]
    if away:
        rank, distance = away[0]
        where = "on another socket" if distance == "far" else "in another NUMA domain of their socket"
        return (f"{len(away)} of {counted(around.ranks, 'rank')} of a node are not near their device:"
                f" local rank {rank} has cores {binding.cores[rank]}, and"
                f" device {binding.devices[rank]} is {where}",)
    if binding.kind == "depth" and not binding.cores and not near_in_order(around):
        return (f"{around.launcher} deals cores in order, and not every rank's are near its device: binding = "
                '"list" in the site file deals them by device_domains',)
    return ()


def _topology(site: Site, devices: Devices, is_host: bool, launcher: str) -> Topology | None:
    # srun's ranks are not confined to the cores of the process that starts it.
    if is_host and not (site.cores and launcher == "srun") and (found := system_topology(site, devices)):
        return found
    return site_topology(site) if site.cores else None


def _allotted(allocation: Allocation, placement: Placement, site: Site) -> int | None:
    """The CPUs that the scheduler gave on a host. On hosts that differ, or of which it tells of some only, so many
    that ranks of the fullest get what they get where they have least: launchers take one number of CPUs a rank."""
    scheduler = scheduler_of(allocation)
    if scheduler and scheduler.SITE_CORES_COUNT and site.cores:
        return None
    known = _cores_and_ranks(allocation, placement)
    if not known:
        return None
    if len(known) == len(placement.ranks) and len({cores for _, cores, _ in known}) == 1:
        return known[0][1]
    share = min(cores // ranks for _, cores, ranks in known)
    return share * placement.most or min(cores for _, cores, ranks in known if cores < ranks)


def _cores_and_ranks(allocation: Allocation, placement: Placement) -> list[tuple[str, int, int]]:
    cores = {host.name: host.cores for host in allocation.hosts}
    return [(host, own, ranks) for host, ranks in placement.ranks if (own := cores[host])]


def core_notes(allocation: Allocation, placement: Placement, binding: Binding) -> tuple[str, ...]:
    """Where hosts have unequal numbers of CPUs a rank, what that leaves each."""
    known = _cores_and_ranks(allocation, placement)
    shares = {cores // ranks: (host, cores, ranks) for host, cores, ranks in known}
    if len(shares) < 2 or not min(shares) or binding.cpus_per_rank is None:
        return ()
    (least, least_cores, few), (most, most_cores, many) = shares[min(shares)], shares[max(shares)]
    return (f"hosts differ: {counted(least_cores, 'CPU')} for {counted(few, 'rank')} on {least},"
            f" {most_cores} for {many} on {most}; every rank gets {binding.cpus_per_rank}",)


def _order(ids: Sequence[str], order: Sequence[str], ranks: int) -> tuple[str, ...]:
    """All devices of `order`, beginning with those of the local ranks, which are dealt over them evenly; () where
    that is the order of `ids`, so that ranks take them as they come."""
    if tuple(order) == tuple(ids):
        return ()
    first = [order[len(ids) * rank // ranks] for rank in range(ranks)] if ranks < len(ids) else order
    return (*first, *(device for device in order if device not in first))


def _device(ids: Sequence[str], local_rank: int) -> str | None:
    if len(ids) == 1:
        return ids[0]
    return ids[local_rank] if local_rank < len(ids) else None
