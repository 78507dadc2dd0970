"""What the reservation gives us: the value that every scheduler's `detect` returns."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ADDRESS = re.compile(r"\d+(\.\d+){3}")


@dataclass(frozen=True)
class Host:
    """One host of the reservation.

    `slots` is the number of ranks that the reservation or the hostfile asks for on it, None where neither says;
    `devices` and `cores` are the accelerators and the CPUs that the scheduler gave there, None where it does not
    say.
    """

    name: str
    slots: int | None = None
    devices: int | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Where ranks may run.

    `ends_at` is in epoch seconds, None where no end is known. `source` names the variables or the file that
    said all this. `step_id` is the Slurm step that this process itself is in, which holds resources of the job that
    its own steps need. `slots_are_a_limit` is true where more ranks than slots would break the user's own words.
    `devices_source` says where the hosts' devices are from.
    """

    scheduler: str
    job_id: str | None
    hosts: tuple[Host, ...]
    ends_at: float | None
    source: str
    slots_are_a_limit: bool = False
    devices_source: str = ""
    step_id: str | None = None

    def noting(self, *notes: str) -> Allocation:
        """The same, with more notes."""
        return replace(self, notes=(*self.notes, *notes))
    notes: tuple[str, ...] = ()


def short_name(host: str) -> str:
    """The part before the first dot, by which two spellings of one host are compared; addresses stay whole."""
    return host if _ADDRESS.fullmatch(host) else host.split(".", 1)[0]


def count_repeats(names: list[str]) -> dict[str, int]:
    """Distinct hosts in order of first appearance, in their first spelling, with how often each was named."""
    spelling: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name in names:
        first = spelling.setdefault(short_name(name), name)
        counts[first] = counts.get(first, 0) + 1
    return counts
