"""Load average of rank 0's node during a run, which tells a busy machine from a slow run (imports no torch)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BUSY = 1.5
"""Load average per CPU from which other programs slow a run down; a run alone on its CPUs has 1."""


@dataclass(frozen=True)
class MachineLoad:
    """Mean of the node's one-minute load averages at the start and the end of a run, and the node's CPUs."""

    average: float
    cpus: int

    @property
    def is_busy(self) -> bool:
        """True if more is ready to run than the CPUs can."""
        return self.average > _BUSY * self.cpus

    def sentence(self) -> str:
        """Return a sentence about the load, for readers of the run's times."""
        return (f"The machine was busy: load average {self.average:.1f} on {self.cpus} CPUs. "
                "Compare these times with a run on an idle machine.")


def load_now() -> dict[str, float]:
    """The node's load average and CPUs, for run.json."""
    return {"average": os.getloadavg()[0], "cpus": os.cpu_count() or 1}


def recorded_load(record: Mapping[str, Any]) -> MachineLoad | None:
    """The load during the run of a record; None for one that did not record its start."""
    start = (record.get("environment") or {}).get("load")
    if start is None:
        return None
    samples = [start["average"], *([end["average"]] if (end := record.get("load_at_end")) else [])]
    return MachineLoad(sum(samples) / len(samples), start["cpus"])
