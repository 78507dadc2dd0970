"""Rendezvous of the ranks, and the network interfaces that they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ezpz_llm.launcher.basics.addresses import Rendezvous, find_local_node, find_rendezvous, list_interfaces
from ezpz_llm.launcher.jobs.option_parsing import Options
from ezpz_llm.launcher.planning.environment import RENDEZVOUS_VARIABLES, is_users_choice
from ezpz_llm.launcher.planning.sites import Site


class Network(NamedTuple):
    """Rendezvous of the ranks, and the network interfaces to use; `source` is that of the interfaces."""

    rendezvous: Rendezvous
    interface: str | None
    source: str
    notes: tuple[str, ...]


def find_network(options: Options, env: Mapping[str, str], site: Site, hosts: tuple[str, ...],
                 run_id: str) -> Network:
    """Choose the address and port of the first rank, and the interfaces.

    Args:
        hosts: nodes that have ranks, in rank order.

    Raises:
        UserError: see `find_rendezvous`.
    """
    interface, source, notes = _choose_interface(options, site, hosts)
    user_values = {name: env[name] for name in RENDEZVOUS_VARIABLES if is_users_choice(name, env)}
    # Prefer the node's name with the site's suffix to the address of its interface.
    uses_suffix = bool(site.master_suffix) and not options.interface
    # Derive the port from the random run id, so that other users cannot predict and occupy it.
    rendezvous = find_rendezvous(hosts, run_id, interface=None if uses_suffix else interface,
                                 interface_source=source, suffix=site.master_suffix,
                                 address=user_values.get("MASTER_ADDR"), port=user_values.get("MASTER_PORT"))
    return Network(rendezvous, interface, source, notes)


def _choose_interface(options: Options, site: Site,
                      hosts: tuple[str, ...]) -> tuple[str | None, str, tuple[str, ...]]:
    """Return the interfaces to use, their source, and a note if this is the first node and it lacks the site's."""
    if options.interface or not site.interface:
        return options.interface, "--interface", ()
    if find_local_node(hosts) == 0 and list_interfaces().keys().isdisjoint(site.interface.split(",")):
        return None, "", (f"{hosts[0]} has no interface {site.interface}, which site {site.name} names",)
    return site.interface, f"site {site.name}", ()
