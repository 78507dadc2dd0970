"""Core lists ("1-8,105") in the forms that launchers want."""

from __future__ import annotations

import os
from pathlib import Path

from ezpz_llm.launch.devices import expand

_CPUS = Path("/sys/devices/system/cpu")


def mask(cores: str) -> str:
    """The hexadecimal bit mask: "0x10e" for "1-3,8"."""
    return hex(sum(1 << number for number in set(expand(cores))))


def logical_cores(cpus: Path = _CPUS) -> dict[int, int]:
    """The system's number of each CPU of this host to the number of its core as hwloc counts: package by package,
    and the cores of one package by their lowest CPU. CPUs that this process may not use are left out, as hwloc
    leaves out those of other containers. Empty where /sys does not tell."""
    packages: dict[str, dict[str, list[int]]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        topology = cpus / f"cpu{number}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text().strip()
            siblings = (topology / "thread_siblings_list").read_text().strip()
        except OSError:
            return {}
        packages.setdefault(package, {}).setdefault(siblings, []).append(number)
    cores = [threads for package in packages.values() for threads in package.values()]
    return {number: index for index, threads in enumerate(cores) for number in threads}
