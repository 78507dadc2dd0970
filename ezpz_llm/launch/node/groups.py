"""Control groups (cgroup v2) of ranks, where the system lets this user make some: nothing that a rank starts leaves
its group, whatever becomes of its environment, its parents, the shim and the agent.

Most systems let nobody (their scheduler ends a job's own group with the job); a service of one's own systemd, Flux
and containers without root do.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ezpz_llm.base import system_text

_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where the second version's hierarchy is, alone or beside the first's."""
_MEMBERS, _KILL, _EVENTS = "cgroup.procs", "cgroup.kill", "cgroup.events"
_EMPTY_WITHIN_S = 5.0
_AGAIN_S = 0.02


def make_group(name: str) -> Path | None:
    """A new group below this process's own. None where the own one is not delegated to this user, which root's own
    groups do not tell, and before Linux 5.14."""
    lines = system_text("/proc/self/cgroup").splitlines()
    own = next((line[len("0::/"):] for line in lines if line.startswith("0::/")), None)
    if own is None or os.geteuid() == 0:
        return None
    for mount in _MOUNTS:
        group = mount / own / name
        if not os.access(group.parent / _MEMBERS, os.W_OK):
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
    """Put this process, and so all that it starts from now on, into the group."""
    with contextlib.suppress(OSError):
        (group / _MEMBERS).write_text("0")


def end_group(group: Path) -> None:
    """Kill all that is in the group, and remove it."""
    with contextlib.suppress(OSError):
        (group / _KILL).write_text("1")
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while "populated 1" in system_text(group / _EVENTS) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
        # A rank may have made groups in it.
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
