"""Type of `summary` in run.json."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from ezpz_llm.core.base.records import Rank, Seconds, Whole


@dataclass(frozen=True)
class Spread:
    """Median of a sample, with its 10 % and 90 % quantiles."""

    median: float
    low: float
    high: float


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

    rank: Rank
    seconds: float
    median_s: float


@dataclass(frozen=True)
class Rates:
    """Rates of a step. All are None if the number of tokens is unknown.

    Attributes:
        flops_per_second_per_device: FLOP/s of the model, with attention counted without the causal mask.
        mfu: fraction of the stated peak; None without a stated peak.
        mfu_causal: `mfu`, but without the part of the attention matmuls that the causal mask removes.
        ceiling_share: fraction of the measured matmul peak.
    """

    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    flops_per_second_per_device: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    ceiling_share: float | None = None


@dataclass(frozen=True)
class Summary(Rates):
    """Summary of a process's steps, with the rates of the median step time.

    Times are in seconds, on rank 0, over steady steps only. `phase_share` has fractions of the total step time,
    which sum to 1. `wall` is the breakdown of the whole run's wall time. The last loss is the mean over the last
    tenth of the steps (at most 50). The first loss is from the first line in the run directory, which an earlier
    process of a resumed run may have written.

    Attributes:
        first_step: number of finished steps when the process began.
        steps: number of finished steps when it ended.
    """

    first_step: Whole = 0
    steps: Whole = 0
    timed_steps: Whole = 0
    skipped_steps: Whole = 0
    first_loss: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    val_step: Whole | None = None
    unigram_entropy: float | None = None
    step_time: Spread = Spread(math.nan, math.nan, math.nan)
    phase_s: dict[str, Spread] = field(default_factory=dict)
    phase_share: dict[str, float] = field(default_factory=dict)
    wall: dict[str, Seconds] = field(default_factory=dict)
    straggler: Straggler | None = None
    bubble: Bubble | None = None
