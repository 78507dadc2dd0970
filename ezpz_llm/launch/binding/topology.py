"""The cores of a host, by socket and NUMA domain, and the domains that its devices are attached to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ezpz_llm.launch.devices import expand
from ezpz_llm.launch.sites import Site

Core = tuple[int, ...]
"""The system's numbers of a core's hardware threads, in order."""


@dataclass(frozen=True)
class Domain:
    """A NUMA domain; its cores are those that ranks may use."""

    number: int
    socket: int
    cores: tuple[Core, ...]


@dataclass(frozen=True)
class Topology:
    """A host. `domains` are in the order of their sockets; `devices` maps a device's name to the number of its
    domain. `is_whole` says whether ranks may use all cores that the host has, but for reserved ones."""

    domains: tuple[Domain, ...]
    source: str
    devices: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def cores(self) -> tuple[Core, ...]:
        """All cores, domain by domain."""
        return tuple(core for domain in self.domains for core in domain.cores)

    @property
    def sockets(self) -> tuple[tuple[Domain, ...], ...]:
        """The domains of each socket that has a core for ranks."""
        found: dict[int, list[Domain]] = {}
        for domain in self.domains:
            if domain.cores:
                found.setdefault(domain.socket, []).append(domain)
        return tuple(map(tuple, found.values()))

    def domains_of(self, cpus: Collection[int]) -> tuple[Domain, ...]:
        """The domains with one of `cpus`."""
        wanted = set(cpus)
        return tuple(domain for domain in self.domains
                     if any(not wanted.isdisjoint(core) for core in domain.cores))


def site_topology(site: Site) -> Topology:
    """What the site file says of every host; without any domain where it says nothing."""
    reserved = set(expand(site.reserved_cores)) if site.reserved_cores else set()
    per_socket = max(1, len(site.cores) // site.sockets)
    domains = tuple(
        Domain(number, number // per_socket, tuple((cpu,) for cpu in expand(cores) if cpu not in reserved))
        for number, cores in enumerate(site.cores))
    devices = {str(device): domain for device, domain in enumerate(site.device_domains)}
    return Topology(domains, f"site {site.name}", devices)
