"""Imbalance of a run: idle pipeline stages, and the slowest rank."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Bubble:
    """Idle fraction of each pipeline stage, from the start of a step to the end of its last backward pass.

    `expected` is (p-1)/(m+p-1), the fraction with equally long stages and free communication (Huang et al. 2019,
    arXiv:1811.06965; the same for the 1F1B schedule). A larger value indicates imbalance or communication.
    """

    idle: tuple[float, ...]
    expected: float

    @property
    def mean(self) -> float:
        """Mean over the stages."""
        return statistics.fmean(self.idle)


@dataclass(frozen=True)
class Straggler:
    """Rank that spent the most time in data and forward, its seconds per step, and the median over ranks."""

    rank: int
    seconds: float
    median_s: float
