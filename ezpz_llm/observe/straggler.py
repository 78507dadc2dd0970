"""The slowest rank of a run, from the spans that every step has anyway.

Ranks of a synchronous step all take equally long, since the fast ones wait for the slow one inside backward or
optimizer: what tells them apart is the time in data and forward. (Divided layers communicate in forward, which
blurs it.)
"""

from __future__ import annotations

import statistics
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ezpz_llm.observe.history import steady
from ezpz_llm.observe.timeline import StepTimes

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


@dataclass(frozen=True)
class Straggler:
    """The rank that spent longest in data and forward, its seconds a step there, and the median over ranks."""

    rank: int
    seconds: float
    median_s: float


class StragglerMeter:
    """Collects this rank's steps; `straggler` compares all ranks'."""

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self._before_collectives = array("d")

    def add(self, times: StepTimes) -> None:
        """Keep a step's time in data and forward."""
        self._before_collectives.append(times.phases["data"] + times.phases["forward"])

    def straggler(self) -> Straggler | None:
        """The slowest rank ahead of its collectives, over steady steps; None for one rank. A collective."""
        if self._dist.world_size == 1 or not self._before_collectives:
            return None
        medians = torch.zeros(self._dist.world_size, device=self._dist.device)
        medians[self._dist.rank] = statistics.median(steady(self._before_collectives))
        torch.distributed.all_reduce(medians)
        seconds = medians.tolist()
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return Straggler(slowest, seconds[slowest], statistics.median(seconds))
