"""Over which interface this process really talks to others: its own established TCP connections."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address

from ezpz_llm.preflight.facts.network import interface_of

_ESTABLISHED = "01"


def used_interfaces(own: Mapping[str, list[str]], other_ports: frozenset[int] = frozenset()) -> list[str]:
    """The interfaces of this process's connections, those to or from `other_ports` left out."""
    inodes = _own_inodes()
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] != _ESTABLISHED or words[9] not in inodes:
                    continue
                (address, port), (_, remote_port) = _endpoint(words[1]), _endpoint(words[2])
                if {port, remote_port}.isdisjoint(other_ports):
                    found.add(interface_of(address, own) or address)
    return sorted(found)


def _own_inodes() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}")):
                found.add(match[1])
    return found


def _endpoint(text: str) -> tuple[str, int]:
    """`0100007F:1F90` as ("127.0.0.1", 8080); the kernel writes addresses as words of the host's own byte order."""
    address, _, port = text.partition(":")
    words = struct.pack(f"={len(address) // 8}I", *(int(address[i:i + 8], 16) for i in range(0, len(address), 8)))
    if len(words) == 4:
        return str(IPv4Address(words)), int(port, 16)
    full = IPv6Address(words)
    return str(ip_address(str(full.ipv4_mapped or full))), int(port, 16)
