"""Cores of this node in /sys, and hwloc's numbers of them."""

from __future__ import annotations

import os
from pathlib import Path

SYS = Path("/sys")


def socket_and_siblings(cpu: int, root: Path = SYS) -> tuple[int, str]:
    """Return the socket of a CPU of this node, and the kernel's list of the CPUs of its core.

    Raises:
        OSError, ValueError: /sys lacks the topology.
    """
    topology = root / f"devices/system/cpu/cpu{cpu}/topology"
    siblings = (topology / "thread_siblings_list").read_text().strip()
    return int((topology / "physical_package_id").read_text()), siblings


def logical_cores(root: Path = SYS) -> dict[int, int]:
    """Map each Linux CPU number of this node to hwloc's logical core number.

    hwloc numbers cores package by package, and within a package by their lowest CPU. CPUs outside this process's
    affinity mask are left out, as hwloc omits CPUs of other containers. Empty if /sys has no topology.
    """
    packages: dict[int, dict[str, list[int]]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        try:
            package, siblings = socket_and_siblings(number, root)
        except (OSError, ValueError):
            return {}
        packages.setdefault(package, {}).setdefault(siblings, []).append(number)
    cores = [threads for package in packages.values() for threads in package.values()]
    return {number: index for index, threads in enumerate(cores) for number in threads}
