"""From a reservation and a site to the cores and devices of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ezpz_llm.launch.allocation import Allocation
from ezpz_llm.launch.binding import Binding, Circumstances, Topology, bind, site_topology, system_topology
from ezpz_llm.launch.devices import MASKS, Devices, visible_devices
from ezpz_llm.launch.dialects.work import Launcher
from ezpz_llm.launch.placement import Placement
from ezpz_llm.launch.schedulers import pbs
from ezpz_llm.launch.sites import Site

_GIVES_DEVICES = ("--gpus-per-task", "--gpu-bind")
"""Options of srun by which it chooses each rank's device itself."""


def devices_of_host(env: Mapping[str, str], site: Site, is_host: bool) -> Devices:
    """The accelerators of a host: those that are visible here, if this is one (`is_host`) or a mask says so; else
    what the site file says."""
    visible = visible_devices(env)
    if site.devices_per_host is None or visible.source in MASKS or (is_host and visible.ids):
        return visible
    return Devices(tuple(map(str, range(site.devices_per_host))), f"site {site.name}")


def site_notes(site: Site, allocation: Allocation, devices: Devices) -> tuple[str, ...]:
    """Where the site file contradicts what is here."""
    notes = []
    if site.scheduler and allocation.job_id and allocation.scheduler != site.scheduler:
        notes.append(f"site {site.name} has {site.scheduler}, and this is a job of {allocation.scheduler}")
    count = site.devices_per_host
    if count and devices.source not in MASKS and len(devices.ids) != count:
        notes.append(f"{len(devices.ids)} device(s) here ({devices.source}), and hosts of site {site.name} have"
                     f" {count}")
    return tuple(notes)


def bind_ranks(wanted: str, site: Site, allocation: Allocation, placement: Placement, launcher: Launcher,
               devices: Devices, is_host: bool, env: Mapping[str, str]) -> tuple[Binding, tuple[str, ...]]:
    """The binding of the ranks of a host, and the devices in the order in which ranks are to see them where it is
    not the system's."""
    name = "pals" if launcher.dialect.startswith("Cray PALS") else launcher.kind
    # Slurm writes each task's mask anew.
    as_they_come = devices.source in MASKS or launcher.kind == "srun"
    mask = () if as_they_come else _order(devices.ids, site, placement.most)
    by_launcher = any(word.startswith(_GIVES_DEVICES) for word in site.options.get(launcher.kind, ()))
    order = () if by_launcher else mask or devices.ids
    around = Circumstances(
        ranks=placement.most,
        hosts=len(placement.ranks),
        launcher=name,
        topology=_topology(site, devices, is_host, name),
        allotted=_allotted(allocation, site, env, is_host),
        devices=tuple(_device(order, local_rank) for local_rank in range(placement.most)),
    )
    return bind(wanted, site, around), mask


def _topology(site: Site, devices: Devices, is_host: bool, launcher: str) -> Topology | None:
    # srun's ranks are not confined to the cores of the process that starts it.
    if is_host and not (site.cores and launcher == "srun") and (found := system_topology(site, devices)):
        return found
    return site_topology(site) if site.cores else None


def _allotted(allocation: Allocation, site: Site, env: Mapping[str, str], is_host: bool) -> int | None:
    # A site that lists its cores gives whole hosts, whatever number its PBS writes there.
    if allocation.scheduler == pbs.NAME and is_host and not site.cores:
        count = env.get("NCPUS", "")
        return int(count) if count.isascii() and count.isdigit() and int(count) else None
    return allocation.cores_per_host


def _order(ids: Sequence[str], site: Site, ranks: int) -> tuple[str, ...]:
    """All devices, beginning with those of the local ranks, which are dealt over them evenly; () where ranks take
    them as they come."""
    if site.device_order != "reversed" or len(ids) < 2:
        return ()
    order = ids[::-1]
    first = [order[len(ids) * rank // ranks] for rank in range(ranks)] if ranks < len(ids) else order
    return (*first, *(device for device in order if device not in first))


def _device(ids: Sequence[str], local_rank: int) -> str | None:
    if len(ids) == 1:
        return ids[0]
    return ids[local_rank] if local_rank < len(ids) else None
