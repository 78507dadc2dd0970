"""Memory of this process: that of the node, or less if a control group (v1 or v2) limits it.

Schedulers set the limit of a job on an ancestor of the process's group, such as Slurm on the job and the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base.system_queries import system_text

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


class _Files(NamedTuple):
    """Names of a group's files: the limit, the used bytes, and the key of reclaimable cache in memory.stat."""

    limit: str
    used: str
    cached: str
    kills: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


def usable_memory(membership: Path = _MEMBERSHIP, mounts: Path = _MOUNTS,
                  meminfo: Path = _MEMORY) -> tuple[int, int]:
    """Return the total and the available bytes: the smallest of the node and all groups of this process.

    0 if unknown. The arguments replace /proc/self/cgroup, /sys/fs/cgroup and /proc/meminfo in tests.
    """
    node = {name: int(kilobytes) * 1024 for name, kilobytes in
            re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", system_text(meminfo), re.MULTILINE)}
    total, available = node.get("MemTotal", 0), node.get("MemAvailable", 0)
    for group, files in _groups(membership, mounts):
        limit, used = (_read_number(group / name) for name in (files.limit, files.used))
        # Version 1 has a huge number instead of "max".
        if limit is None or used is None or limit >= total:
            continue
        cached = re.search(rf"^{files.cached} (\d+)$", system_text(group / "memory.stat"), re.MULTILINE)
        used -= int(cached[1]) if cached else 0
        total, available = limit, min(available, max(0, limit - max(0, used)))
    return total, available


def kill_counters(membership: Path = _MEMBERSHIP, mounts: Path = _MOUNTS) -> list[Path]:
    """Return the files with the number of out-of-memory kills in this process's own groups."""
    found: dict[_Files, Path] = {}
    for group, files in _groups(membership, mounts):
        if (group / files.kills).is_file():
            found.setdefault(files, group / files.kills)
    return [*found.values()]


def _groups(membership: Path, mounts: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the memory groups of the process in `membership`, from its own to the root, and their files.

    In a container, the path may be the one outside it, while the container's group is mounted as the root.
    """
    for line in system_text(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots, files = [mounts / "memory"], _V1
        elif number == "0" and not controllers:
            # The second is used beside groups of version 1.
            roots, files = [mounts, mounts / "unified"], _V2
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            for length in range(len(parts), -1, -1):
                if (group := root.joinpath(*parts[:length])).is_dir():
                    yield group, files


def _read_number(path: Path) -> int | None:
    text = system_text(path).strip()
    return int(text) if text.isdigit() and len(text) <= len(str(1 << 64)) else None
