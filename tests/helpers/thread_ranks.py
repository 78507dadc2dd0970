"""Ranks of a process group as threads of one process, to test code that communicates without a launch."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from slowness import scaled
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from ezpz_llm.training.dist import Degrees, Mesh
from ezpz_llm.training.dist.degrees import Axis

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

    Raises the first exception of a rank. The other ranks then wait in their collective for its timeout.

    Args:
        degrees: degrees of which only one exceeds 1.
    """
    store, size = HashStore(), degrees.dp * degrees.tp * degrees.pp * degrees.sp
    timeout = datetime.timedelta(seconds=scaled(10))

    def run(rank: int) -> T:
        """Create the rank's group, and call the function."""
        return work(ThreadMesh(degrees, rank, ProcessGroupGloo(store, rank, size, timeout)))

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        for rank in wait(ranks, return_when=FIRST_EXCEPTION).done:
            rank.result()
        return [rank.result() for rank in ranks]
