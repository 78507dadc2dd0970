"""Network interfaces, what names resolve to, and by which interface an address is reached."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ezpz_llm.launch.addresses import address_towards, resolve
from ezpz_llm.launch.interfaces import own_interfaces

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
    found = {name: [address] if address else [] for name, address in own_interfaces().items()}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for words in map(str.split, lines):
        found.setdefault(words[5], []).append(str(ip_address(bytes.fromhex(words[0]))))
    return found


def interface_of(address: str | None, own: Mapping[str, list[str]]) -> str | None:
    """Which interface has this address."""
    return next((name for name, addresses in own.items() if address in addresses), None)
