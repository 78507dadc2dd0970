"""Facts of a node's network: interfaces, names, routes, connections, and the network that NCCL or MPI chose."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from ezpz_llm.launch.addresses import address_towards, resolve

_NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE")


def network_facts(env: Mapping[str, str]) -> dict[str, Any]:
    """The interfaces with their addresses, those that `env` names, and the way to MASTER_ADDR."""
    own = addresses()
    facts: dict[str, Any] = {
        "interfaces": own,
        "named_interfaces": named_interfaces(env),
        "name_resolves_to": resolve(socket.gethostname()),
    }
    if master := env.get("MASTER_ADDR"):
        address = address_towards(master)
        facts["master"] = {"address": master, "port": env.get("MASTER_PORT"), "resolves_to": resolve(master)}
        facts["route"] = {"interface": interface_of(address, own), "address": address}
    return facts


def named_interfaces(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that name the interface ranks are to talk on, with what they say."""
    return {name: env[name] for name in _NAMING if env.get(name)}


def addresses() -> dict[str, list[str]]:
    """Every interface with its addresses, IPv4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {name: [one.address.partition("%")[0] for one in known if one.family in families]
            for name, known in psutil.net_if_addrs().items()}


def interface_of(address: str | None, own: Mapping[str, list[str]]) -> str | None:
    """Which interface has this address."""
    return next((name for name, addresses in own.items() if address in addresses), None)


# Which network a communication library chose, read from what it logs.
_ABOUT = re.compile(r"NET/|Using network|Assigned NET plugin|provider|nic: \{|CCL_ATL_TRANSPORT", re.IGNORECASE)

# NCCL and RCCL under NCCL_DEBUG=INFO, with and without the OFI plug-in; the last match counts, since a plug-in that
# is tried and fails says so before the one that is taken.
_NCCL = {
    "network": re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$"),
    "provider": re.compile(r"NET/OFI Selected [Pp]rovider is (\w+)"),
    "interface": re.compile(r"NET/(?:Socket|IB) ?: Using \[0\]([^:\s]+)"),
}
# oneCCL under CCL_LOG_LEVEL=info.
_ONECCL = {
    "transport": re.compile(r"CCL_ATL_TRANSPORT: (\w+)"),
    "provider": re.compile(r"\|CCL_INFO\| provider: (\w+)"),
    "interface": re.compile(r"nic: \{ name (?:\w+:)?([^,\s]+)"),
}


def is_about_network(line: str) -> bool:
    """Is this a line that `read_network` may learn from?"""
    return bool(_ABOUT.search(line))


def read_network(lines: Sequence[str]) -> dict[str, str]:
    """`library`, `network` and, where they are told, `provider` and `interface`; empty where nothing is told.

    oneCCL over MPI does not know what MPI uses: its network is then `mpi`.
    """
    nccl = _matches(_NCCL, [line for line in lines if "NCCL" in line])
    if "network" in nccl:
        return {"library": "NCCL", **nccl}
    oneccl = _matches(_ONECCL, [line for line in lines if "CCL_" in line])
    network = oneccl.get("provider") or oneccl.get("transport")
    return {"library": "oneCCL", "network": network, **oneccl} if network else {}


def _matches(patterns: dict[str, re.Pattern[str]], lines: Sequence[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        for name, pattern in patterns.items():
            if match := pattern.search(line.strip()):
                found[name] = match[1]
    return found


_TCP = ("socket", "tcp", "sockets")
_LIBFABRIC = ("aws libfabric", "libfabric", "ofi", "cxi")


def family(network: str) -> str:
    """`tcp` for NCCL's Socket and libfabric's tcp, `libfabric` for all names of it, others in lower case."""
    name = network.strip().lower()
    # libfabric can itself speak TCP (`tcp;ofi_rxm`): that is the loss to be found.
    if name.partition(";")[0] in _TCP:
        return "tcp"
    return "libfabric" if name in _LIBFABRIC else name


def used_interfaces(own: Mapping[str, list[str]], other_ports: frozenset[int] = frozenset()) -> list[str]:
    """The interfaces over which this process really talks to others: those of its established TCP connections,
    without connections to or from `other_ports`."""
    process = psutil.Process()
    # Before psutil 6 its name was another.
    connections = getattr(process, "net_connections", None) or process.connections
    found = set()
    for one in connections("tcp"):
        if one.status == psutil.CONN_ESTABLISHED and {one.laddr.port, one.raddr.port}.isdisjoint(other_ports):
            address = one.laddr.ip.removeprefix("::ffff:")
            found.add(interface_of(address, own) or address)
    return sorted(found)
