"""Which reservation are we in? One file a scheduler; this one holds the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ezpz_llm.launch.allocation import Allocation
from ezpz_llm.launch.schedulers import hostfile, local, pbs, slurm, started

_IN_ORDER = (started.detect, slurm.detect, pbs.detect, local.detect)


def find_allocation(env: Mapping[str, str], hosts_file: Path | None = None) -> Allocation:
    """The reservation that `env` describes; its hosts replaced by those of `hosts_file` where one is given.

    Raises:
        UserError: the variables of a scheduler contradict each other, or a hostfile cannot be used.
    """
    found = next(allocation for detect in _IN_ORDER if (allocation := detect(env)))
    if hosts_file is None or found.scheduler == started.NAME:
        return found
    return replace(found, hosts=hostfile.read(hosts_file), source=f"--hostfile {hosts_file}",
                   slots_are_a_limit=True)
