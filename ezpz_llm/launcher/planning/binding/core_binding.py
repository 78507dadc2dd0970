"""Choice of each rank's cores from the site file, the node's topology and the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ezpz_llm.core.base import apportion, count_noun
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.launcher.planning.binding.topology import Core, Domain, Topology
from ezpz_llm.launcher.planning.rank_binding import Binding, CoreOption
from ezpz_llm.launcher.planning.sites import Site

COUNTING = (CoreOption.COUNT, CoreOption.SCHEDULER)
"""Options with which a launcher can choose cores itself, given the number of cores per rank."""


class BindingInputs(NamedTuple):
    """Inputs of `choose_binding`.

    Args:
        ranks: number of ranks on the node that has the most.
        hosts: number of nodes with ranks.
        launcher: name of the launcher, for messages.
        option: the launcher's option for cores.
        topology: topology of the nodes; None if unknown.
        allotted: CPUs that the scheduler allocated per node; None if unknown.
        devices: accelerator of each local rank.
        is_mask_fixed: launch cannot reorder `devices`, since the user or the launcher sets the device mask.
    """

    ranks: int
    hosts: int
    launcher: str
    option: CoreOption
    topology: Topology | None
    allotted: int | None
    devices: tuple[str | None, ...]
    is_mask_fixed: bool = False


def choose_binding(wanted: str, site: Site, inputs: BindingInputs) -> Binding:
    """Choose the binding of each local rank. `wanted` is "auto" or "none".

    If the domains of the devices are known, each rank gets cores from the NUMA domain of its device. A site's
    "depth" is respected: ranks then get cores in order, and under Cray PALS `device_order` puts devices into that
    order. If a device mask prevents that, the launcher gets explicit lists of cores instead.
    """
    kind, source = site.binding, f"site {site.name}"
    if kind == "auto":
        kind = "depth" if inputs.option is CoreOption.SCHEDULER else "list"
        source = f"{inputs.launcher} binds" if kind == "depth" else "--bind auto"
    if wanted == "none" or kind == "none":
        return _unbound_binding(site, inputs, "--bind none" if wanted == "none" else source)
    if kind == "depth" and inputs.option is CoreOption.SCHEDULER:
        if not (counts := _count_cores(site, inputs)):
            return _unbound_binding(site, inputs, "the CPUs per node are unknown")
        if not _needs_explicit_cores(site, inputs):
            return Binding("depth", devices=inputs.devices, source=source, **counts)
        kind, source = "list", "cores near each rank's device"
    topology, reason = inputs.topology, _reason_not_pinned(site, inputs)
    if topology is None or reason is not None:
        return _unbound_binding(site, inputs, reason or source)
    if topology.source != source:
        source = f"{source}, cores of {topology.source}"
    in_order = _assign_in_order(topology, inputs.ranks)
    if kind == "depth" and inputs.option in COUNTING:
        if not inputs.is_mask_fixed or _are_near(topology, in_order, _device_domains(inputs)):
            return _pinned_binding("depth", in_order, topology, site, inputs, source)
        source += ", cores near each rank's device"
    assigned_cores = deal_cores(topology, inputs.ranks, _device_domains(inputs))
    return _pinned_binding("list", assigned_cores, topology, site, inputs, source)


def device_order(ids: Sequence[str], topology: Topology | None) -> tuple[str, ...]:
    """Return devices in the order of their NUMA domains, or unchanged if the domain of any device is unknown."""
    if topology is None or not topology.devices.keys() >= set(ids):
        return tuple(ids)
    domains = topology.devices
    # Sort by the order in which cores are assigned, which may differ from the domains' numbers.
    positions = {domain.number: position for position, domain in enumerate(topology.domains)}
    return tuple(sorted(ids, key=lambda device: positions.get(domains[device], len(positions))))


def _device_domains(inputs: BindingInputs) -> tuple[int | None, ...]:
    domains = inputs.topology.devices if inputs.topology else {}
    return tuple(domains.get(device) if device is not None else None for device in inputs.devices)


def _needs_explicit_cores(site: Site, inputs: BindingInputs) -> bool:
    """Return True if a launcher that assigns cores in order would place a rank far from its device.

    False in a job without whole nodes, where the available cores are unknown.
    """
    topology = inputs.topology
    if site.binding != "auto" or inputs.allotted is None or topology is None or not topology.is_whole:
        return False
    return not _reason_not_pinned(site, inputs) and not are_ranks_near_in_order(inputs)


def are_ranks_near_in_order(inputs: BindingInputs) -> bool:
    """Return True if each rank is near its device when cores are assigned in order, or if that is unknown."""
    topology = inputs.topology
    if topology is None or inputs.ranks > len(topology.cores):
        return True
    return _are_near(topology, _assign_in_order(topology, inputs.ranks), _device_domains(inputs))


def _are_near(topology: Topology, assigned_cores: Sequence[Sequence[Core]], domains: Sequence[int | None]) -> bool:
    return all(number is None or number in _numbers(topology, cores)
               for cores, number in zip(assigned_cores, domains, strict=True))


def _numbers(topology: Topology, cores: Sequence[Core]) -> set[int]:
    return {domain.number for domain in topology.domains_of([cpu for core in cores for cpu in core])}


def _reason_not_pinned(site: Site, inputs: BindingInputs) -> str | None:
    """Return the reason why ranks are not bound to explicit cores; None if they can be."""
    topology = inputs.topology
    if topology is None or not topology.cores:
        return "the nodes' cores are unknown on this node"
    if inputs.ranks > len(topology.cores):
        return f"{inputs.ranks} ranks share {count_noun(len(topology.cores), 'core')}"
    cpus = sum(map(len, topology.cores)) * (site.threads_per_core if site.cores else 1)
    if inputs.allotted is not None and inputs.allotted < cpus:
        return f"the job has {inputs.allotted} of a node's {cpus} CPUs, and it is unknown which"
    if site.binding != "auto":
        return None
    if inputs.ranks == 1:
        return "the only rank of a node has all its cores"
    if inputs.hosts > 1 and not topology.is_whole:
        return "the job has only some of this node's cores, and may have other cores on other nodes"
    return None


def _pinned_binding(kind: str, assigned_cores: Sequence[Sequence[Core]], topology: Topology, site: Site,
                    inputs: BindingInputs, source: str) -> Binding:
    cpus = [tuple(sorted(cpu for core in cores for cpu in core)) for cores in assigned_cores]
    domains = [topology.domains_of(rank_cpus) for rank_cpus in cpus]
    return Binding(
        kind,
        cores=tuple(map(fold_numbers, cpus)),
        domains=tuple(fold_numbers(domain.number for domain in rank_domains) for rank_domains in domains),
        devices=inputs.devices,
        distances=tuple(_distance(topology, rank_cpus, device)
                        for rank_cpus, device in zip(cpus, inputs.devices, strict=True)),
        cpus_per_rank=min(map(len, cpus)) * (site.threads_per_core if site.cores else 1),
        cpus_per_host=_count_cores(site, inputs)["cpus_per_host"],
        cores_per_rank=min(map(len, assigned_cores)),
        source=source,
        by_shim=inputs.option is CoreOption.NONE,
    )


def _assign_in_order(topology: Topology, ranks: int) -> list[tuple[Core, ...]]:
    per_rank = len(topology.cores) // ranks
    return [topology.cores[per_rank * rank:per_rank * (rank + 1)] for rank in range(ranks)]


def _distance(topology: Topology, cpus: Sequence[int], device: str | None) -> str | None:
    domain = topology.devices.get(device) if device is not None else None
    if domain is None:
        return None
    cpu_domains = topology.domains_of(cpus)
    if domain in {cpu_domain.number for cpu_domain in cpu_domains}:
        return "near"
    sockets = {other.socket for other in topology.domains if other.number == domain}
    return "same socket" if sockets & {cpu_domain.socket for cpu_domain in cpu_domains} else "far"


def _unbound_binding(site: Site, inputs: BindingInputs, source: str) -> Binding:
    return Binding(devices=inputs.devices, source=source, **_count_cores(site, inputs))


def _count_cores(site: Site, inputs: BindingInputs) -> dict[str, Any]:
    """Return the numbers of CPUs and cores per rank and per node; empty if unknown."""
    cores = inputs.topology.cores if inputs.topology else ()
    # Number of CPUs per core: as the site's launcher counts them, else as this node does.
    per_core = site.threads_per_core if site.cores else max(map(len, cores), default=1)
    cpus = len(cores) * per_core
    if inputs.allotted is not None and (inputs.allotted < cpus or not cpus
                                        or inputs.option is CoreOption.SCHEDULER):
        cpus = min(inputs.allotted, cpus) if site.cores else inputs.allotted
    if not cpus:
        return {}
    return {"cpus_per_host": cpus, "cpus_per_rank": max(1, cpus // inputs.ranks),
            "cores_per_rank": max(1, cpus // per_core // inputs.ranks)}


def deal_cores(topology: Topology, ranks: int, wanted: Sequence[int | None] = ()) -> tuple[tuple[Core, ...], ...]:
    """Return the cores of each of `ranks` local ranks; () if there are fewer cores than ranks.

    `wanted` has the NUMA domain of each rank's device; it is ignored if a domain is None. Each rank gets one of the
    parts from `_split_evenly`, near its device if possible. If a domain has too few parts, its ranks
    share its cores, all ranks get as many cores as those of the fullest domain, and the other cores are idle. No
    rank moves to another socket for that, since the memory of its socket would then be unused.
    """
    assigned_cores = _split_evenly(topology, ranks)
    near = [domain for domain in wanted if domain is not None]
    if not assigned_cores or not near or len(near) < len(wanted) or _are_near(topology, assigned_cores, near):
        return assigned_cores
    assigned_cores = _match_to_domains(topology, assigned_cores, near)
    if _are_near(topology, assigned_cores, near):
        return assigned_cores
    in_domains = _assign_in_domains(topology, near)
    sockets = {domain.number: domain.socket for domain in topology.domains}
    stay = all(sockets.get(domain) in {sockets[number] for number in _numbers(topology, cores)}
               for cores, domain in zip(assigned_cores, near, strict=True))
    return in_domains if stay and all(in_domains) else assigned_cores


def _match_to_domains(topology: Topology, parts: Sequence[tuple[Core, ...]],
                      domains: Sequence[int]) -> tuple[tuple[Core, ...], ...]:
    """Assign `parts` to ranks: first those near a rank's device, then the remaining ones."""
    free = list(range(len(parts)))
    assigned: dict[int, int] = {}
    for rank, domain in enumerate(domains):
        near = next((part for part in free if domain in _numbers(topology, parts[part])), None)
        if near is not None:
            assigned[rank] = near
            free.remove(near)
    return tuple(parts[assigned[rank] if rank in assigned else free.pop(0)] for rank in range(len(parts)))


def _assign_in_domains(topology: Topology, domains: Sequence[int]) -> tuple[tuple[Core, ...], ...]:
    cores = {domain.number: domain.cores for domain in topology.domains}
    per_rank = min(len(cores.get(domain, ())) // domains.count(domain) for domain in domains)
    before = [domains[:rank].count(domain) for rank, domain in enumerate(domains)]
    return tuple(cores.get(domain, ())[per_rank * position:per_rank * (position + 1)]
                 for domain, position in zip(domains, before, strict=True))


def _split_evenly(topology: Topology, ranks: int) -> tuple[tuple[Core, ...], ...]:
    """Split a node's cores into `ranks` parts.

    Ranks are distributed over sockets in proportion to their cores. No rank is on two sockets unless there are
    fewer ranks than sockets. On a socket all ranks get the same number of neighboring cores. Ranks stay within NUMA
    domains if that costs no core: if the number of ranks divides the number of domains or is a multiple of it.
    """
    sockets = topology.sockets
    if ranks > len(topology.cores) or not ranks:
        return ()
    if ranks <= len(sockets):
        parts = [sockets[len(sockets) * rank // ranks:len(sockets) * (rank + 1) // ranks] for rank in range(ranks)]
        return tuple(_cores_of([domain for socket in part for domain in socket]) for part in parts)
    shares = apportion([len(_cores_of(socket)) for socket in sockets], ranks)
    return tuple(cores for socket, share in zip(sockets, shares, strict=True) if share
                 for cores in _split_socket(socket, share))


def _split_socket(domains: Sequence[Domain], ranks: int) -> list[tuple[Core, ...]]:
    per_rank = len(_cores_of(domains)) // ranks
    groups = [domains]
    if ranks % len(domains) == 0:
        groups = [(domain,) for domain in domains]
    elif len(domains) % ranks == 0:
        width = len(domains) // ranks
        groups = [domains[position:position + width] for position in range(0, len(domains), width)]
    in_group = ranks // len(groups)
    if any(len(_cores_of(group)) < per_rank * in_group for group in groups):
        groups, in_group = [domains], ranks
    return [_cores_of(group)[per_rank * position:per_rank * (position + 1)]
            for group in groups for position in range(in_group)]


def _cores_of(domains: Sequence[Domain]) -> tuple[Core, ...]:
    return tuple(core for domain in domains for core in domain.cores)
