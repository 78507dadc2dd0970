"""Which network a communication library chose, read from what it logs."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
