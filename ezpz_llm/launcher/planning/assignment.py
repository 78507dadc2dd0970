"""Assignment of ranks to nodes, devices, and cores, and choice of the launcher that starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ezpz_llm.launcher.basics.addresses import is_local_node_among
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.launcher.jobs.option_parsing import Options
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.planning.binding.inputs import bind_ranks, devices_of_nodes
from ezpz_llm.launcher.planning.dialects import choose_launcher
from ezpz_llm.launcher.planning.dialects.work import Launcher
from ezpz_llm.launcher.planning.placement import Placement, place_ranks
from ezpz_llm.launcher.planning.rank_binding import Binding
from ezpz_llm.launcher.planning.sites import Site, find_site


class Assignment(NamedTuple):
    """Assignment of ranks to nodes, cores and devices, and the launcher that starts them.

    Attributes:
        mask: devices in the order in which ranks see them; empty for the system's order.
        distance_notes: notes about ranks that are far from their device.
    """

    site: Site
    allocation: Allocation
    devices: Devices
    placement: Placement
    launcher: Launcher
    binding: Binding
    mask: tuple[str, ...]
    distance_notes: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes that have ranks, in rank order."""
        return tuple(name for name, _ in self.placement.ranks)


def assign_ranks(options: Options, env: Mapping[str, str], allocation: Allocation) -> Assignment:
    """Assign ranks to the nodes of an allocation.

    Raises:
        UserError: the site is unknown, the ranks do not fit, or the launcher is not available.
    """
    site = find_site(options.site, env)
    is_here_in_allocation = is_local_node_among([host.name for host in allocation.hosts])
    devices, allocation = devices_of_nodes(env, site, allocation, is_here_in_allocation)
    placement = place_ranks(allocation, devices, options.ranks, options.per_host)
    launcher = _choose_launcher(options, env, allocation, placement, site)
    return Assignment(site, allocation, devices, placement, launcher,
                       *bind_ranks(options.binding, site, allocation, placement, launcher, devices,
                                   is_here_in_allocation))


def _choose_launcher(options: Options, env: Mapping[str, str], allocation: Allocation, placement: Placement,
                     site: Site) -> Launcher:
    site_launcher = site.launcher if options.launcher == "auto" and allocation.scheduler == site.scheduler else None
    launcher = choose_launcher(site_launcher or options.launcher, allocation.scheduler, placement.world_size, env,
                               site.dialect)
    return launcher._replace(source=f"site {site.name}") if site_launcher else launcher
