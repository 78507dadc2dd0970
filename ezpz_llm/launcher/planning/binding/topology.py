"""Topology of a node, from the site file or /sys: cores by socket and NUMA domain, and domains of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import group_by_key, system_text
from ezpz_llm.launcher.basics.devices import Devices, device_addresses
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.planning.logical_cores import SYS, socket_and_siblings
from ezpz_llm.launcher.planning.sites import Site

Core = tuple[int, ...]
"""Linux CPU numbers of a core's hardware threads, in order."""


class Domain(NamedTuple):
    """NUMA domain, with the cores that ranks may use."""

    number: int
    socket: int
    cores: tuple[Core, ...]


class Topology(NamedTuple):
    """Topology of a node.

    Attributes:
        domains: NUMA domains, in the order of their sockets.
        devices: maps a device's name to the number of its domain.
        is_whole: True if this process may run on all online CPUs of the node, or if the site file is the source.
    """

    domains: tuple[Domain, ...]
    source: str
    devices: Mapping[str, int] = {}
    is_whole: bool = True

    @property
    def cores(self) -> tuple[Core, ...]:
        """Cores that ranks may use, domain by domain."""
        return tuple(core for domain in self.domains for core in domain.cores)

    @property
    def sockets(self) -> tuple[tuple[Domain, ...], ...]:
        """Domains with cores for ranks, grouped by socket."""
        by_socket = group_by_key((domain.socket, domain) for domain in self.domains if domain.cores)
        return tuple(map(tuple, by_socket.values()))

    def domains_of(self, cpus: Collection[int]) -> tuple[Domain, ...]:
        """Return the domains that contain any of `cpus`."""
        numbers = set(cpus)
        return tuple(domain for domain in self.domains
                     if any(not numbers.isdisjoint(core) for core in domain.cores))


def site_topology(site: Site) -> Topology:
    """Return the topology in the site file, without domains if the file lists no cores."""
    reserved = _reserved(site)
    per_socket = max(1, len(site.cores) // site.sockets)
    domains = tuple(
        Domain(number, number // per_socket, tuple((cpu,) for cpu in expand_numbers(cores) if cpu not in reserved))
        for number, cores in enumerate(site.cores))
    devices = {str(device): domain for device, domain in enumerate(site.device_domains)}
    return Topology(domains, f"site {site.name}", devices)


def _reserved(site: Site) -> set[int]:
    return set(expand_numbers(site.reserved_cores)) if site.reserved_cores else set()


def system_topology(site: Site, devices: Devices, root: Path = SYS,
                    allowed: Collection[int] | None = None) -> Topology | None:
    """Return the topology of this node from /sys; None if /sys lacks it.

    It contains the cores that this process may run on, without those that the site reserves. If the site lists
    cores, it contains only these.

    Args:
        root: replaces /sys in tests.
        allowed: replaces this process's affinity mask.
    """
    affinity = set(os.sched_getaffinity(0) if allowed is None else allowed)
    listed = site_topology(site).cores
    usable = affinity & {cpu for core in listed for cpu in core} if listed else affinity - _reserved(site)
    try:
        domains = _domains(root, usable)
        online = set(expand_numbers((root / "devices/system/cpu/online").read_text().strip()))
    except (OSError, ValueError):
        return None
    attached = _site_device_domains(root, site) | _device_domains(root, devices)
    return Topology(domains, "this node as Linux lists them", attached, is_whole=online <= affinity)


def _domains(root: Path, usable: Collection[int]) -> tuple[Domain, ...]:
    domain_of_cpu = _domain_of_cpu(root)
    cores: dict[tuple[int, int], dict[str, list[int]]] = {}
    for cpu in sorted(usable):
        socket, siblings = socket_and_siblings(cpu, root)
        cores.setdefault((socket, domain_of_cpu.get(cpu, 0)), {}).setdefault(siblings, []).append(cpu)
    return tuple(Domain(number, socket, tuple(sorted(map(tuple, by_siblings.values()))))
                 for (socket, number), by_siblings in sorted(cores.items()))


def _domain_of_cpu(root: Path) -> dict[int, int]:
    domains: dict[int, int] = {}
    # A kernel without NUMA has no such folder, and a memory-only domain has no CPUs.
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        if cpus := (folder / "cpulist").read_text().strip():
            domains |= dict.fromkeys(expand_numbers(cpus), int(folder.name.removeprefix("node")))
    return domains


def _device_domains(root: Path, devices: Devices) -> dict[str, int]:
    addresses = device_addresses()
    domains = {}
    for device in devices.ids:
        # A device mask may also contain UUIDs, which /sys does not have.
        if re.fullmatch(r"\d+", device) and int(device) < len(addresses):
            domain = system_text(root / "bus/pci/devices" / addresses[int(device)] / "numa_node").strip()
            if domain.isdigit():
                domains[device] = int(domain)
    return domains


def _site_device_domains(root: Path, site: Site) -> dict[str, int]:
    # A site file numbers domains by their position in its list of cores, which may differ from Linux's numbers.
    domain_of_cpu = _domain_of_cpu(root)
    first_cpu = [expand_numbers(cores)[0] for cores in site.cores]
    return {str(device): domain_of_cpu.get(first_cpu[position], position)
            for device, position in enumerate(site.device_domains)}
