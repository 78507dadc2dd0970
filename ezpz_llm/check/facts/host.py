"""Facts of a node: name, boot, cores, memory, disks, versions, and the environment variables that matter."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ezpz_llm.base.package_data import installed
from ezpz_llm.launch.devices import MASKS, visible_devices
from ezpz_llm.rundir import redact

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ONLINE = Path("/sys/devices/system/cpu/online")
_CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def host_facts() -> dict[str, Any]:
    """Host name, boot id, this process's cores and the host's; memory, /dev/shm and temporary folder in bytes."""
    return {
        "host": socket.gethostname(),
        "boot_id": _text(_BOOT_ID),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": expand_ranges(_text(_ONLINE)),
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
    own = re.search(r"^0::(/.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    folder = _CGROUP / own[1].lstrip("/") if own else _CGROUP
    limit, used = _text(folder / "memory.max"), _text(folder / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return None, 0
    cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return int(limit), max(0, int(used) - int(cached[1] if cached else 0))


def room(folder: Path) -> dict[str, Any]:
    """Total and free bytes of the file system of `folder`; None where it is missing."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"path": str(folder), "total": None, "free": None}
    return {"path": str(folder), "total": usage.total, "free": usage.free}


def expand_ranges(text: str) -> list[int]:
    """[0, 1, 2, 8] for the kernel's `0-2,8`."""
    found: list[int] = []
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def numa_domains() -> dict[str, list[int]]:
    """The cores of each NUMA domain that has any."""
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    domains = {folder.name[4:]: expand_ranges(_text(folder / "cpulist")) for folder in folders}
    return {name: cores for name, cores in domains.items() if cores}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
    return {maker: version for maker, path in _DRIVERS.items() if (version := _text(path))}


def mpi_library() -> str | None:
    """The first line in which the MPI library that mpi4py loads says what it is; None where it loads none.

    Asked in a process of its own: a library that does not fit can end the process that loads it.
    """
    if installed("mpi4py") is None:
        return None
    try:
        done = subprocess.run([sys.executable, "-c", _MPI_QUESTION], capture_output=True, text=True, check=False,
                              timeout=_MPI_TIMEOUT_S, stdin=subprocess.DEVNULL, env=_without_ranks())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return first_line(done.stdout) if done.returncode == 0 else None


def first_line(text: str) -> str | None:
    """The first line with anything on it, blanks folded."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), None)


def _without_ranks() -> dict[str, str]:
    # The question must not take part in a launch that is going on.
    return {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "PALS_", "OMPI_"))}
