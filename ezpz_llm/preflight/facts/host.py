"""The host: name, boot, cores, memory, room on its own disks."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ONLINE = Path("/sys/devices/system/cpu/online")
_MEMORY = Path("/proc/meminfo")
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


def memory() -> dict[str, int | None]:
    """Bytes of memory: `total` and `free` (available without swapping), of the host or of a tighter cgroup."""
    found = {}
    for line in _text(_MEMORY).splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    total, free = found.get("MemTotal"), found.get("MemAvailable")
    limit, used = _cgroup_memory()
    if limit is not None and total is not None and free is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    return {"total": total, "free": free}


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
