"""How much of a pipeline's time its stages stand idle, from the spans that every step has anyway.

p stages, m micro batches a step.
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
class Bubble:
    """Idle shares of the time from a step's begin to the end of its last backward pass, by stage.

    `expected` is (p-1)/(m+p-1), the share where all stages take equally long and sending costs nothing (Huang et
    al. 2019, arXiv:1811.06965; the same for the 1F1B schedule). What exceeds it is imbalance and communication.
    """

    idle: tuple[float, ...]
    expected: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.idle)


class BubbleMeter:
    """Collects this rank's steps; `bubble` puts all ranks' together."""

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self._busy, self._span = array("d"), array("d")

    def add(self, times: StepTimes) -> None:
        """Keep a step's time in data, forward and backward, and the time until the optimizer's phase."""
        phases = times.phases
        self._busy.append(phases["data"] + phases["forward"] + phases["backward"])
        self._span.append(times.step_time_s - phases["optimizer"])

    def bubble(self, accumulation: int) -> Bubble | None:
        """Medians over steady steps; None without a pipeline. Collective.

        The first stage ends last: until then its time is the pipeline's. The other stages wait for it in the
        optimizer's phase, for the sum of gradients or their norm, so that their own clocks do not tell.
        """
        mesh = self._dist.mesh
        if mesh.pp_size == 1 or not self._busy:
            return None
        sums = torch.zeros(mesh.pp_size + 1, device=self._dist.device)
        sums[mesh.pp_rank] = statistics.median(steady(self._busy))
        if mesh.pp_rank == 0:
            sums[-1] = statistics.median(steady(self._span))
        torch.distributed.all_reduce(sums)
        *busy, span = sums.tolist()
        stages = mesh.pp_size
        return Bubble(tuple(1 - seconds / span for seconds in busy), (stages - 1) / (accumulation + stages - 1))
