"""Network of the collectives: read from the library's log, and faster devices that it does not use (no torch)."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import system_text
from ezpz_llm.core.rundir.records import Network

_ABOUT = re.compile(r"NET/|Using network|Assigned NET plugin|provider|nic: \{|CCL_ATL_TRANSPORT", re.IGNORECASE)

# NCCL and RCCL under NCCL_DEBUG=INFO, with and without the OFI plug-in. The last match is used: a plug-in that
# fails logs before the plug-in that NCCL then chooses.
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
_LOG_BYTES = 1 << 20
_DEBUG_LINE = re.compile(r"^\s*NCCL_DEBUG\s*=", re.MULTILINE)
_LIBFABRIC_DEVICES = ("cxi", "rdmap", "efa")
"""Beginnings of the names of devices of Slingshot and EFA."""
_SOFTWARE_DEVICES = ("rxe", "siw")
"""Beginnings of the names of RDMA devices in software, over TCP."""

PLUGIN_ADVICE = ("load the module with the network plug-in (aws-ofi-nccl, rccl-net-plugin), and put the plug-in's "
                 "folder on LD_LIBRARY_PATH")


def is_about_network(line: str) -> bool:
    """Return True if `parse_network` may need this line."""
    return bool(_ABOUT.search(line))


def parse_network(lines: Sequence[str]) -> dict[str, str]:
    """Return what the log of a communication library says about its network, empty if nothing.

    Keys are those of `Network`. The network is `mpi` for oneCCL over MPI, which does not know the network that MPI
    uses.
    """
    nccl = _matches(_NCCL, [line for line in lines if "NCCL" in line])
    if "network" in nccl:
        return {"library": "NCCL", **nccl}
    oneccl = _matches(_ONECCL, [line for line in lines if "CCL_" in line])
    network = oneccl.get("provider") or oneccl.get("transport")
    return {"library": "oneCCL", "network": network, **oneccl} if network else {}


def _matches(patterns: dict[str, re.Pattern[str]], lines: Sequence[str]) -> dict[str, str]:
    matches = {}
    for line in lines:
        for name, pattern in patterns.items():
            if match := pattern.search(line.strip()):
                matches[name] = match[1]
    return matches


_TCP = ("socket", "tcp", "sockets")
_LIBFABRIC = ("aws libfabric", "libfabric", "ofi", "cxi")


def network_family(network: str) -> str:
    """Normalize a network's name: `tcp` for sockets, `libfabric` for its aliases, else the name in lower case."""
    name = network.strip().lower()
    # libfabric can also run over TCP (`tcp;ofi_rxm`), which is the slow case to detect.
    if name.partition(";")[0] in _TCP:
        return "tcp"
    return "libfabric" if name in _LIBFABRIC else name


@contextlib.contextmanager
def logged_network(backend: str) -> Iterator[Network]:
    """Fill in the network that NCCL chooses for the communicator that the block creates.

    NCCL logs it to a file that this function removes. NCCL reads its settings only once, so that it also logs the
    few later communicators there. If the user has set NCCL_DEBUG, the log belongs to the user, and only the library
    is filled in. oneCCL logs only to standard output.
    """
    network = Network({"nccl": "NCCL", "xccl": "oneCCL"}.get(backend, backend))
    if backend == "gloo":
        network.network, network.interface = "tcp", os.environ.get("GLOO_SOCKET_IFNAME", "")
    path = None
    if backend == "nccl" and not _user_logs(os.environ):
        with contextlib.suppress(OSError):  # no rank may fail here, where the others wait for it
            handle, path = tempfile.mkstemp(prefix="nccl-")
            os.close(handle)
    if path is None:
        yield network
        return
    settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": path}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield network
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        for name, value in parse_network(system_text(path, most=_LOG_BYTES).splitlines()).items():
            setattr(network, name, value)
        network.unused = unused_devices(network, os.environ)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _user_logs(env: Mapping[str, str]) -> bool:
    """Return True if the user or the site has set NCCL_DEBUG, in the environment or in NCCL's configuration."""
    files = env.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"
    return "NCCL_DEBUG" in env or any(_DEBUG_LINE.search(system_text(file)) for file in files)


def find_fast_devices(system: Path = Path("/sys/class")) -> list[str]:
    """Return the node's active InfiniBand, RoCE, EFA and Slingshot devices, with their rates if known."""
    devices = []
    for state in sorted(system.glob("infiniband/*/ports/*/state")):
        name = state.parts[-4]
        if "ACTIVE" in system_text(state) and not name.startswith(_SOFTWARE_DEVICES):
            rate = system_text(state.with_name("rate")).partition("(")[0].strip()
            devices.append(name + (f" ({rate})" if rate else ""))
    return [*devices, *(device.name for device in sorted(system.glob("cxi/*")))]


def unused_devices(network: Network, env: Mapping[str, str], system: Path = Path("/sys/class")) -> list[str]:
    """Return the node's faster network devices if NCCL fell back to TCP, and the user has not requested TCP."""
    is_requested = network_family(env.get("NCCL_NET", "")) == "tcp"
    if network.library != "NCCL" or network_family(network.network) != "tcp" or is_requested:
        return []
    devices = find_fast_devices(system)
    if env.get("NCCL_IB_DISABLE", "0") == "0":
        return devices
    # The variable does not concern the devices of Slingshot and EFA, which NCCL uses through libfabric.
    return [device for device in devices if device.startswith(_LIBFABRIC_DEVICES)]


def describe_fallback(network: Network) -> str | None:
    """Describe collectives that use TCP although nodes have faster devices; None if they do not."""
    if not network.unused:
        return None
    interface = f" on {network.interface}" if network.interface else ""
    return (f"{network.library} fell back to TCP{interface}, which is many times slower than the node's "
            f"{', '.join(network.unused)}; {PLUGIN_ADVICE}")
