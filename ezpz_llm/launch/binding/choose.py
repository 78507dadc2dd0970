"""Binding of ranks to cores, decided from the site, the node's topology and the launcher, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.base import apportioned, counted
from ezpz_llm.launch.binding.topology import Core, Domain, Topology
from ezpz_llm.launch.hostlist import fold_numbers
from ezpz_llm.launch.sites import Site

COUNTING = ("srun", "pals")
"""Launchers that place a number of cores a rank by themselves."""
WITHOUT_OPTION = ("direct", "torchrun", "jsrun")
"""Launchers without any option for cores, or none that names them: there the rank shim binds."""


@dataclass(frozen=True)
class Binding:
    """What each local rank gets. Every tuple has one entry a local rank, or none where it is not known.

    Args:
        kind: "list" (the launcher is told `cores`), "depth" (it is told `cpus_per_rank`), "none".
        cores: the CPUs that a rank may run on ("1-8").
        domains: the NUMA domains that these are in ("0").
        devices: the accelerator that the rank takes.
        distances: from its cores to its device: "near" (the same NUMA domain), "same socket", "far".
        cpus_per_rank: CPUs as the launcher counts them.
        cpus_per_host: CPUs of a host, likewise.
        cores_per_rank: cores, without second hardware threads.
        source: why.
        by_shim: the launcher has no option for it, and the rank shim binds instead.
    """

    kind: str = "none"
    cores: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    devices: tuple[str | None, ...] = ()
    distances: tuple[str | None, ...] = ()
    cpus_per_rank: int | None = None
    cpus_per_host: int | None = None
    cores_per_rank: int | None = None
    source: str = ""
    by_shim: bool = False


@dataclass(frozen=True)
class BindingInputs:
    """Facts that a binding is decided from.

    Args:
        ranks: on the host with most of them.
        hosts: how many hosts get ranks.
        launcher: "srun", "flux", "jsrun", "pals", "mpiexec", "torchrun", "direct".
        topology: of the hosts; None where it is not known.
        allotted: CPUs of a host that the scheduler gave, None where it does not say.
        devices: the accelerator of each local rank.
        is_mask_fixed: ranks must take devices in this order: a mask is the user's, or the launcher's own.
    """

    ranks: int
    hosts: int
    launcher: str
    topology: Topology | None
    allotted: int | None
    devices: tuple[str | None, ...]
    is_mask_fixed: bool = False


def bind(wanted: str, site: Site, around: BindingInputs) -> Binding:
    """Choose the binding of each local rank. `wanted` is the user's word, "auto" or "none".

    Cores are dealt from the NUMA domain of each rank's device where these are known. A site's "depth" stands: there
    ranks get cores in order, and under Cray PALS `device_order` puts devices into the same order; where a mask
    forbids that, cores are spelled out instead."""
    how, source = site.binding, f"site {site.name}"
    if how == "auto":
        how = "depth" if around.launcher == "srun" else "list"
        source = "srun binds" if how == "depth" else "--bind auto"
    if wanted == "none" or how == "none":
        return _unbound(site, around, "--bind none" if wanted == "none" else source)
    if how == "depth" and around.launcher == "srun":
        if not _is_better_spelled(site, around):
            return Binding("depth", devices=around.devices, source=source, **_counted(site, around))
        how, source = "list", "cores near each rank's device"
    topology, reason = around.topology, _hindrance(site, around)
    if topology is None or reason is not None:
        return _unbound(site, around, reason or source)
    if topology.source != source:
        source = f"{source}, cores of {topology.source}"
    in_order = _in_a_row(topology, around.ranks)
    if how == "depth" and around.launcher in COUNTING:
        if not around.is_mask_fixed or _are_near(topology, in_order, _device_domains(around)):
            return _spelled("depth", in_order, topology, site, around, source)
        source += ", cores near each rank's device"
    dealt = deal(topology, around.ranks, _device_domains(around))
    return _spelled("list", dealt, topology, site, around, source)


def device_order(ids: Sequence[str], topology: Topology | None) -> tuple[str, ...]:
    """Devices in the order of the NUMA domains that they are attached to; as they are where one is not known."""
    if topology is None or not topology.devices.keys() >= set(ids):
        return tuple(ids)
    domains = topology.devices
    # The order in which cores are dealt, which need not be that of the domains' numbers.
    places = {domain.number: place for place, domain in enumerate(topology.domains)}
    return tuple(sorted(ids, key=lambda device: places.get(domains[device], len(places))))


def _device_domains(around: BindingInputs) -> tuple[int | None, ...]:
    known = around.topology.devices if around.topology else {}
    return tuple(known.get(device) if device is not None else None for device in around.devices)


def _is_better_spelled(site: Site, around: BindingInputs) -> bool:
    """Would srun, which deals cores in order, put a rank away from its device, in a job that has whole nodes?"""
    topology = around.topology
    if site.binding != "auto" or around.allotted is None or topology is None or not topology.is_whole:
        return False
    return not _hindrance(site, around) and not near_in_order(around)


def near_in_order(around: BindingInputs) -> bool:
    """Is each rank near its device if cores are dealt in order? True where that cannot be told."""
    topology = around.topology
    if topology is None or around.ranks > len(topology.cores):
        return True
    return _are_near(topology, _in_a_row(topology, around.ranks), _device_domains(around))


def _are_near(topology: Topology, dealt: Sequence[Sequence[Core]], wanted: Sequence[int | None]) -> bool:
    return all(domain is None or domain in _numbers(topology, cores)
               for cores, domain in zip(dealt, wanted, strict=True))


def _numbers(topology: Topology, cores: Sequence[Core]) -> set[int]:
    return {domain.number for domain in topology.domains_of([cpu for core in cores for cpu in core])}


def _hindrance(site: Site, around: BindingInputs) -> str | None:
    """Why cores cannot be spelled out."""
    topology = around.topology
    if topology is None or not topology.cores:
        return "the hosts' cores are not known from here"
    if around.ranks > len(topology.cores):
        return f"{around.ranks} ranks share {counted(len(topology.cores), 'core')}"
    cpus = sum(map(len, topology.cores)) * (site.threads_per_core if site.cores else 1)
    if around.allotted is not None and around.allotted < cpus:
        return f"the job has {around.allotted} of a host's {cpus} CPUs, and nothing says which"
    if site.binding != "auto":
        return None
    if around.ranks == 1:
        return "one rank has its host's cores"
    if around.hosts > 1 and not topology.is_whole:
        return "the job has only some of this host's cores, and other hosts' may be others"
    return None


def _spelled(kind: str, dealt: Sequence[Sequence[Core]], topology: Topology, site: Site, around: BindingInputs,
             source: str) -> Binding:
    cpus = [tuple(sorted(cpu for core in cores for cpu in core)) for cores in dealt]
    domains = [topology.domains_of(own) for own in cpus]
    return Binding(
        kind,
        cores=tuple(map(fold_numbers, cpus)),
        domains=tuple(fold_numbers(domain.number for domain in own) for own in domains),
        devices=around.devices,
        distances=tuple(_distance(topology, own, device)
                        for own, device in zip(cpus, around.devices, strict=True)),
        cpus_per_rank=min(map(len, cpus)) * (site.threads_per_core if site.cores else 1),
        cpus_per_host=_counted(site, around)["cpus_per_host"],
        cores_per_rank=min(map(len, dealt)),
        source=source,
        by_shim=around.launcher in WITHOUT_OPTION,
    )


def _in_a_row(topology: Topology, ranks: int) -> list[tuple[Core, ...]]:
    each = len(topology.cores) // ranks
    return [topology.cores[each * rank:each * (rank + 1)] for rank in range(ranks)]


def _distance(topology: Topology, cpus: Sequence[int], device: str | None) -> str | None:
    domain = topology.devices.get(device) if device is not None else None
    if domain is None:
        return None
    own = topology.domains_of(cpus)
    if domain in {found.number for found in own}:
        return "near"
    sockets = {found.socket for found in topology.domains if found.number == domain}
    return "same socket" if sockets & {found.socket for found in own} else "far"


def _unbound(site: Site, around: BindingInputs, source: str) -> Binding:
    return Binding(devices=around.devices, source=source, **_counted(site, around))


def _counted(site: Site, around: BindingInputs) -> dict[str, Any]:
    """As many CPUs and cores as each rank of a host can have; empty where nobody says."""
    cores = around.topology.cores if around.topology else ()
    # A CPU is what the site's launcher counts, else what this host does.
    per_core = site.threads_per_core if site.cores else max(map(len, cores), default=1)
    cpus = len(cores) * per_core
    if around.allotted is not None and (around.allotted < cpus or not cpus or around.launcher == "srun"):
        cpus = min(around.allotted, cpus) if site.cores else around.allotted
    if not cpus:
        return {}
    return {"cpus_per_host": cpus, "cpus_per_rank": max(1, cpus // around.ranks),
            "cores_per_rank": max(1, cpus // per_core // around.ranks)}


# Dealing a host's cores to its ranks.
def deal(topology: Topology, ranks: int, wanted: Sequence[int | None] = ()) -> tuple[tuple[Core, ...], ...]:
    """The cores of each of `ranks` local ranks; () where there are fewer cores than ranks.

    `wanted` has the number of the NUMA domain of each rank's device; where one is not known, devices do not count.
    Ranks get the parts that `_evenly` makes, each the one near its device. Where a domain has too few of these, its
    ranks share its cores alone, all ranks get as many as those of the fullest domain, and the rest of the cores is
    idle; but no rank moves to another socket for that, which would leave the memory of one unused.
    """
    dealt = _evenly(topology, ranks)
    near = [domain for domain in wanted if domain is not None]
    if not dealt or not near or len(near) < len(wanted) or _are_near(topology, dealt, near):
        return dealt
    dealt = _matched(topology, dealt, near)
    if _are_near(topology, dealt, near):
        return dealt
    in_domains = _in_own_domains(topology, near)
    sockets = {domain.number: domain.socket for domain in topology.domains}
    stay = all(sockets.get(domain) in {sockets[number] for number in _numbers(topology, cores)}
               for cores, domain in zip(dealt, near, strict=True))
    return in_domains if stay and all(in_domains) else dealt


def _matched(topology: Topology, parts: Sequence[tuple[Core, ...]],
             wanted: Sequence[int]) -> tuple[tuple[Core, ...], ...]:
    """`parts` in the order in which as many ranks as can be are near their device; the others take what is left."""
    left = list(range(len(parts)))
    taken: dict[int, int] = {}
    for rank, domain in enumerate(wanted):
        near = next((part for part in left if domain in _numbers(topology, parts[part])), None)
        if near is not None:
            taken[rank] = near
            left.remove(near)
    return tuple(parts[taken[rank] if rank in taken else left.pop(0)] for rank in range(len(parts)))


def _in_own_domains(topology: Topology, wanted: Sequence[int]) -> tuple[tuple[Core, ...], ...]:
    cores = {domain.number: domain.cores for domain in topology.domains}
    each = min(len(cores.get(domain, ())) // wanted.count(domain) for domain in wanted)
    before = [wanted[:rank].count(domain) for rank, domain in enumerate(wanted)]
    return tuple(cores.get(domain, ())[each * place:each * (place + 1)]
                 for domain, place in zip(wanted, before, strict=True))


def _evenly(topology: Topology, ranks: int) -> tuple[tuple[Core, ...], ...]:
    """Parts of a node's cores, as many as `ranks`.

    Ranks are dealt over sockets evenly, by the number of cores that each has, and no rank is on two sockets unless
    there are fewer ranks than sockets. On one socket all ranks get equally many neighbouring cores. They keep to
    NUMA domains where that costs no core: where the one number divides the other.
    """
    sockets = topology.sockets
    if ranks > len(topology.cores) or not ranks:
        return ()
    if ranks <= len(sockets):
        parts = [sockets[len(sockets) * rank // ranks:len(sockets) * (rank + 1) // ranks] for rank in range(ranks)]
        return tuple(_joined([domain for socket in part for domain in socket]) for part in parts)
    shares = apportioned([len(_joined(socket)) for socket in sockets], ranks)
    return tuple(cores for socket, share in zip(sockets, shares, strict=True) if share
                 for cores in _on_one_socket(socket, share))


def _on_one_socket(domains: Sequence[Domain], ranks: int) -> list[tuple[Core, ...]]:
    each = len(_joined(domains)) // ranks
    groups = [domains]
    if ranks % len(domains) == 0:
        groups = [(domain,) for domain in domains]
    elif len(domains) % ranks == 0:
        width = len(domains) // ranks
        groups = [domains[place:place + width] for place in range(0, len(domains), width)]
    in_group = ranks // len(groups)
    if any(len(_joined(group)) < each * in_group for group in groups):
        groups, in_group = [domains], ranks
    return [_joined(group)[each * place:each * (place + 1)] for group in groups for place in range(in_group)]


def _joined(domains: Sequence[Domain]) -> tuple[Core, ...]:
    return tuple(core for domain in domains for core in domain.cores)
