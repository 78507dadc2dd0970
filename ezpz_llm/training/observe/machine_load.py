"""Load average of rank 0's node, to distinguish a busy machine from a slow run (does not import torch)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ezpz_llm.core.rundir.records import Load, RunRecord

_BUSY = 1.5
"""Load average per CPU above which other programs probably slow down a run. A run alone on its node has 1."""


@dataclass(frozen=True)
class MachineLoad:
    """Mean one-minute load average of a node at the start and end of a run, and the node's number of CPUs."""

    average: float
    cpus: int

    @property
    def is_busy(self) -> bool:
        """True if the load average per CPU is above 1.5."""
        return self.average > _BUSY * self.cpus

    def sentence(self) -> str:
        """Return a warning that the load affected the run's times."""
        return (f"The machine was busy: load average {self.average:.1f} on {self.cpus} CPUs. "
                "Compare these times with a run on an idle machine.")


def load_now() -> Load:
    """Return the node's load average and number of CPUs, for run.json."""
    return Load(average=os.getloadavg()[0], cpus=os.cpu_count() or 1)


def recorded_load(record: RunRecord) -> MachineLoad | None:
    """Return the load during a run from its record; None if the record has no load."""
    if record.environment is None or record.environment.load is None:
        return None
    loads = [load for load in (record.environment.load, record.load_at_end) if load]
    return MachineLoad(sum(load.average for load in loads) / len(loads), loads[0].cpus)
