"""Facts that one process finds on its host, as values of JSON (imports no torch): cores, memory, disks, versions
and the environment variables that matter; interfaces, names, routes, and the network that NCCL or MPI
chose."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ezpz_llm.base import installed, system_text
from ezpz_llm.launch.addresses import address_towards, resolve
from ezpz_llm.launch.devices import MASKS, visible_devices
from ezpz_llm.launch.hostlist import expand_numbers
from ezpz_llm.rundir import redact

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ONLINE = Path("/sys/devices/system/cpu/online")
_CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def host_facts() -> dict[str, Any]:
    """Host name, boot id, this process's cores and the host's; memory, /dev/shm and temporary folder in bytes."""
    return {
        "host": socket.gethostname(),
        "boot_id": system_text(_BOOT_ID).strip(),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": _cores_in(_ONLINE),
        "memory": memory(),
        "shm": room(SHARED_MEMORY),
        "tmp": room(Path(tempfile.gettempdir())),
    }


def memory() -> dict[str, int]:
    """Bytes of memory: `total` and `free` (available without swapping), of the host or of a tighter cgroup."""
    found = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    if limit is None or limit >= found.total:
        return {"total": found.total, "free": found.available}
    return {"total": limit, "free": min(found.available, max(0, limit - used))}


def _cgroup_memory() -> tuple[int | None, int]:
    """The limit on this process's own cgroup and what is used of it, file cache left out; None without a limit."""
    own = re.search(r"^0::(/.*)$", system_text("/proc/self/cgroup"), re.MULTILINE)
    folder = _CGROUP / own[1].lstrip("/") if own else _CGROUP
    limit, used = system_text(folder / "memory.max").strip(), system_text(folder / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None, 0
    cached = re.search(r"^inactive_file (\d+)$", system_text(folder / "memory.stat"), re.MULTILINE)
    return int(limit), max(0, int(used) - int(cached[1] if cached else 0))


def room(folder: Path) -> dict[str, Any]:
    """Total and free bytes of the file system of `folder`; None where it is missing."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"path": str(folder), "total": None, "free": None}
    return {"path": str(folder), "total": usage.total, "free": usage.free}


def numa_domains() -> dict[str, list[int]]:
    """The cores of each NUMA domain that has any."""
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    domains = {folder.name[4:]: _cores_in(folder / "cpulist") for folder in folders}
    return {name: cores for name, cores in domains.items() if cores}


def _cores_in(path: Path) -> list[int]:
    """[0, 1, 2, 8] for the kernel's `0-2,8`; a memory-only domain has none."""
    text = system_text(path).strip()
    return [*expand_numbers(text)] if text else []


# The part of a rank's environment that changes how it runs.
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HSA_XNACK")
_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "GLOO_", "MPICH_", "TORCH_NCCL_", "PYTORCH_")


def environment_facts(env: Mapping[str, str]) -> dict[str, Any]:
    """`environment`: what should agree between nodes. `masks`: visible devices, which rightly differ between ranks.
    `devices`: the accelerators that are visible by mask or driver, and how many the driver has `installed`. Secrets
    are redacted."""
    devices = visible_devices(env)
    return {
        "environment": redact({name: env[name] for name in sorted(env)
                               if name in _NAMES or name.startswith(_PREFIXES)}),
        "masks": {name: env[name] for name in (*MASKS, "ONEAPI_DEVICE_SELECTOR") if name in env},
        "devices": {"ids": list(devices.ids), "source": devices.source, "installed": len(visible_devices({}).ids)},
    }


# Versions: of Python and its packages, of torch's build without importing it, of the kernel and the drivers.
PACKAGES = ("deepspeed", "numpy", "mpi4py", "ezpz_llm")
_DRIVERS = {"NVIDIA": Path("/sys/module/nvidia/version"), "AMD": Path("/sys/module/amdgpu/version"),
            "Intel": Path("/sys/module/xe/version")}
_MPI_QUESTION = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
                 "print(MPI.Get_library_version())")
_MPI_TIMEOUT_S = 20


def versions() -> dict[str, str]:
    """Name to version of everything that should be the same on every node; what is absent is left out."""
    found = {"python": platform.python_version(), "torch": torch_build().get("version"),
             **{package: installed(package) for package in PACKAGES},
             "kernel": platform.release(), **{f"{name} driver": version for name, version in drivers().items()}}
    return {name: version for name, version in found.items() if version}


def torch_build() -> dict[str, str]:
    """`version` (with the build, such as +cpu) and what it was built for (`cuda`, `hip`, `xpu`: their versions),
    from torch's own version file; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    values = _assigned(path) if path.is_file() else {}
    found = {"version": values.get("__version__") or installed("torch")}
    found |= {name: values.get(name) for name in ("cuda", "hip", "xpu")}
    return {name: value for name, value in found.items() if value}


def _assigned(path: Path) -> dict[str, str]:
    """The names that a module assigns a text to."""
    found: dict[str, str] = {}
    for line in ast.parse(path.read_text()).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


def drivers() -> dict[str, str]:
    """Accelerator makers to the version of the driver that the kernel has loaded."""
    return {maker: version for maker, path in _DRIVERS.items() if (version := system_text(path).strip())}


def mpi_library() -> str | None:
    """The first line in which the MPI library that mpi4py loads says what it is; None where it loads none.

    Asked in a process of its own: a library that does not fit can end the process that loads it.
    """
    if installed("mpi4py") is None:
        return None
    # The question must not take part in a launch that is going on.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "PALS_", "OMPI_"))}
    try:
        done = subprocess.run([sys.executable, "-c", _MPI_QUESTION], capture_output=True, text=True, check=False,
                              timeout=_MPI_TIMEOUT_S, stdin=subprocess.DEVNULL, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return first_line(done.stdout) if done.returncode == 0 else None


def first_line(text: str) -> str | None:
    """The first line with anything on it, blanks folded."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), None)


# The network.
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
