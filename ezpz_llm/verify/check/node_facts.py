"""Facts of this process and its node (does not import torch).

Cores, memory, disks, versions, environment variables, interfaces, and routes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from ezpz_llm.core.base import installed, system_text
from ezpz_llm.core.base.memory_groups import usable_memory
from ezpz_llm.core.rundir import redact
from ezpz_llm.launcher.basics.addresses import address_towards, resolve
from ezpz_llm.launcher.basics.devices import MASKS, visible_devices
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.verify.check.facts import Devices, Facts, Master, Route, Space

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ONLINE = Path("/sys/devices/system/cpu/online")
_SHARED_MEMORY = Path("/dev/shm")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE")


def gather_facts(info: RankInfo, env: Mapping[str, str]) -> Facts:
    """Return all facts of this rank that do not need torch, with secrets in its environment redacted."""
    host, master, devices = socket.gethostname(), env.get("MASTER_ADDR"), visible_devices(env)
    return Facts(
        rank=info.rank, world_size=info.world_size, local_rank=info.local_rank, local_size=info.local_size,
        node_rank=info.node_rank, rank_source=info.source, rank_notes=list(info.notes), host=host,
        boot_id=system_text(_BOOT_ID).strip(), pid=os.getpid(), cores=sorted(os.sched_getaffinity(0)),
        host_cores=_cores_in(_ONLINE), memory=Space(*usable_memory()), shm=file_system_space(_SHARED_MEMORY),
        tmp=file_system_space(Path(tempfile.gettempdir())), interfaces=addresses(),
        named_interfaces={name: env[name] for name in _INTERFACE_VARIABLES if env.get(name)},
        name_resolves_to=resolve(host),
        master=Master(master, env.get("MASTER_PORT"), resolve(master)) if master else None,
        route=route_to(master) if master else None, environment=_environment(env),
        masks={name: env[name] for name in (*MASKS, "ONEAPI_DEVICE_SELECTOR") if name in env},
        devices=Devices(list(devices.ids), devices.source, len(visible_devices({}).ids)), versions=versions(),
        stages={})


def file_system_space(folder: Path) -> Space:
    """Return the total and free bytes of `folder`'s file system."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Space(None, None, str(folder))
    return Space(usage.total, usage.free, str(folder))


def numa_domains() -> dict[str, list[int]]:
    """Return the cores of each NUMA domain, except domains without cores."""
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    domains = {folder.name[4:]: _cores_in(folder / "cpulist") for folder in folders}
    return {name: cores for name, cores in domains.items() if cores}


def _cores_in(path: Path) -> list[int]:
    """Return [0, 1, 2, 8] for the kernel's `0-2,8`, and [] for a memory-only domain."""
    text = system_text(path).strip()
    return [*expand_numbers(text)] if text else []


_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HSA_XNACK")
_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "GLOO_", "MPICH_", "TORCH_NCCL_", "PYTORCH_")


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that should be the same on all nodes, with secrets redacted."""
    names = (name for name in sorted(env) if name in _NAMES or name.startswith(_PREFIXES))
    return {name: redact(env[name], name) for name in names}


PACKAGES = ("deepspeed", "numpy", "mpi4py", "ezpz_llm")
_DRIVERS = {"NVIDIA": Path("/sys/module/nvidia/version"), "AMD": Path("/sys/module/amdgpu/version"),
            "Intel": Path("/sys/module/xe/version")}
_MPI_PROGRAM = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
                 "print(MPI.Get_library_version())")
_MPI_TIMEOUT_S = 20


def versions() -> dict[str, str]:
    """Return the versions of software that should be the same on every node. Omits missing software."""
    by_name = {"python": platform.python_version(), "torch": torch_build().get("version"),
               **{package: installed(package) for package in PACKAGES},
               "kernel": platform.release(), **{f"{name} driver": version for name, version in drivers().items()}}
    return {name: version for name, version in by_name.items() if version}


def torch_build() -> dict[str, str]:
    """Return torch's `version`, and that of `cuda`, `hip` or `xpu` for which it was built; empty without torch.

    Reads torch's version file and does not import torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    values = _string_constants(path) if path.is_file() else {}
    build = {"version": values.get("__version__") or installed("torch")}
    build |= {name: values.get(name) for name in ("cuda", "hip", "xpu")}
    return {name: value for name, value in build.items() if value}


def _string_constants(path: Path) -> dict[str, str]:
    """Return the string constants that a module assigns to names."""
    constants: dict[str, str] = {}
    for line in ast.parse(path.read_text()).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return constants


def drivers() -> dict[str, str]:
    """Return the versions of the loaded accelerator drivers, by vendor."""
    return {vendor: version for vendor, path in _DRIVERS.items() if (version := system_text(path).strip())}


def mpi_library() -> str | None:
    """Return the first line of the version text of mpi4py's MPI library, or None if mpi4py cannot load one.

    Uses a subprocess, because an incompatible library can abort the process that loads it.
    """
    if installed("mpi4py") is None:
        return None
    # The subprocess must not join a running launch.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "PALS_", "OMPI_"))}
    try:
        result = subprocess.run([sys.executable, "-c", _MPI_PROGRAM], capture_output=True, text=True, check=False,
                                timeout=_MPI_TIMEOUT_S, stdin=subprocess.DEVNULL, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return first_line(result.stdout) if result.returncode == 0 else None


def first_line(text: str) -> str | None:
    """Return the first nonblank line, with whitespace collapsed."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), None)


def route_to(master: str) -> Route:
    """Return the route from this node to MASTER_ADDR."""
    address = address_towards(master)
    return Route(_interface_of(address, addresses()), address)


def addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface, IPv4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
            for name, entries in psutil.net_if_addrs().items()}


def _interface_of(address: str | None, own: Mapping[str, list[str]]) -> str | None:
    """Return the interface that has this address, or None."""
    return next((name for name, addresses in own.items() if address in addresses), None)


def used_interfaces(own: Mapping[str, list[str]], other_ports: frozenset[int] = frozenset()) -> list[str]:
    """Return the interfaces of this process's established TCP connections, except those with `other_ports`."""
    process = psutil.Process()
    # psutil before 6 has only `connections`.
    connections = getattr(process, "net_connections", None) or process.connections
    interfaces = set()
    for connection in connections("tcp"):
        local, remote = connection.laddr, connection.raddr
        if connection.status == psutil.CONN_ESTABLISHED and {local.port, remote.port}.isdisjoint(other_ports):
            address = local.ip.removeprefix("::ffff:")
            interfaces.add(_interface_of(address, own) or address)
    return sorted(interfaces)
