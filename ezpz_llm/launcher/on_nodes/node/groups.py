"""Cgroups (v2) of ranks, on systems where the user may create them.

Processes cannot leave their rank's cgroup, even if they clear their environment, or if their parents, the shim
and the agent are killed. Most schedulers do not delegate cgroups (they end a job's own cgroup with the job);
services of the user's systemd, Flux and rootless containers do.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ezpz_llm.core.base import system_text

_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Mount points of the v2 hierarchy, alone or next to v1."""
_PROCESSES, _KILL, _EVENTS = "cgroup.procs", "cgroup.kill", "cgroup.events"
_EMPTY_WITHIN_S = 5.0
_POLL_S = 0.02


def make_group(name: str) -> Path | None:
    """Create a cgroup below the one of this process and return its path, or None if that is not possible.

    It requires Linux 5.14 and a cgroup that is delegated to this user. For root this cannot be
    checked, so that the result is None.
    """
    lines = system_text("/proc/self/cgroup").splitlines()
    own_path = next((line[len("0::/"):] for line in lines if line.startswith("0::/")), None)
    if own_path is None or os.geteuid() == 0:
        return None
    for mount in _MOUNTS:
        group = mount / own_path / name
        if not os.access(group.parent / _PROCESSES, os.W_OK):
            continue
        try:
            group.mkdir()
            if (group / _KILL).exists():
                return group
            group.rmdir()
        except OSError:
            return None
    return None


def enter_group(group: Path) -> None:
    """Move this process, and thus all its future children, to the cgroup."""
    with contextlib.suppress(OSError):
        (group / _PROCESSES).write_text("0")


def end_group(group: Path) -> None:
    """Kill all processes in the cgroup, and remove it."""
    with contextlib.suppress(OSError):
        (group / _KILL).write_text("1")
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while "populated 1" in system_text(group / _EVENTS) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # Ranks may have created cgroups in it.
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
