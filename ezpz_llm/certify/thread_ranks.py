"""Ranks of a process group as threads of one process, to check code that communicates without a launch."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from ezpz_llm.dist import Degrees, Mesh
from ezpz_llm.dist.degrees import Axis

_TIMEOUT = datetime.timedelta(seconds=60)
"""Time limit of a collective, of which each takes milliseconds."""
T = TypeVar("T")


class ThreadMesh(Mesh):
    """Mesh of ranks along a single axis, with their group instead of the default group."""

    def __init__(self, degrees: Degrees, rank: int, group: ProcessGroup) -> None:
        super().__init__(degrees, rank)
        self._all_ranks = group

    def group(self, *axes: Axis) -> ProcessGroup | None:
        """Return the group of all ranks if they lie along one of these axes; else None."""
        return self._all_ranks if self.size(*axes) > 1 else None

    def stage_group(self) -> ProcessGroup:
        """Return the group of all ranks."""
        return self._all_ranks


def run_ranks(degrees: Degrees, work: Callable[[ThreadMesh], T]) -> list[T]:
    """Call a function on every rank, each in a thread, and return the results by rank.

    Args:
        degrees: degrees of which only one exceeds 1.
    """
    store, size = HashStore(), degrees.dp * degrees.tp * degrees.pp * degrees.sp

    def run(rank: int) -> T:
        """Create the rank's group, and call the function."""
        return work(ThreadMesh(degrees, rank, ProcessGroupGloo(store, rank, size, _TIMEOUT)))

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        for rank in wait(ranks, return_when=FIRST_EXCEPTION).done:
            rank.result()  # raises the first error; the other ranks only lose their connection
        return [rank.result() for rank in ranks]
