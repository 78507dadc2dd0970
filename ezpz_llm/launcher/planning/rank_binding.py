"""Binding of the ranks of a node to cores and devices, and the options of launchers for it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class CoreOption(Enum):
    """Option of a launcher that binds ranks to cores."""

    NONE = "none"
    """No option: the rank shim binds ranks."""
    LIST = "list"
    """List of the cores of each rank."""
    COUNT = "count"
    """Number of cores per rank, or a list."""
    SCHEDULER = "scheduler"
    """Number of cores per rank, or a list. Without one, the scheduler assigns cores and devices to each rank."""


class Binding(NamedTuple):
    """Cores and device of each local rank. Tuples have one entry per local rank, or are empty if unknown.

    Args:
        kind: "list" (the launcher gets `cores`), "depth" (it gets `cpus_per_rank`), or "none".
        cores: CPUs that the rank may run on ("1-8").
        domains: NUMA domains of these CPUs ("0").
        devices: accelerator that the rank uses.
        distances: from the rank's cores to its device: "near" (same NUMA domain), "same socket", "far".
        cpus_per_rank: CPUs, in the launcher's unit.
        cpus_per_host: CPUs per node, in the launcher's unit.
        cores_per_rank: physical cores.
        source: reason for the choice, shown in the plan.
        by_shim: the launcher has no option for cores, so the rank shim binds.
    """

    kind: str = "none"
    cores: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    devices: tuple[str | None, ...] = ()
    distances: tuple[str | None, ...] = ()
    cpus_per_rank: int | None = None
    cpus_per_host: int | None = None
    cores_per_rank: int | None = None
    source: str = ""
    by_shim: bool = False
