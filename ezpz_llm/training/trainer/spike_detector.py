"""Detection of loss and gradient-norm spikes, and of too many bad steps in a row (imports no torch).

Detection adds no cost to a step. It observes losses and gradient norms when they are flushed, `--log-every` steps
at a time. These numbers are already reduced over ranks, so all ranks decide the same at the same step without
communication. The engine applies the resulting limit on the gradient norm to later steps, on the device
(training/engine/gradients.py). As a result, up to `--log-every` more steps run before a bad step is detected.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections import deque
from typing import Any

from msgspec import Struct

from ezpz_llm.core.base.records import Whole
from ezpz_llm.training.trainer.config import TrainConfig

_WINDOW = 128
"""Number of most recent steps in the medians of loss and gradient norm."""
MIN_STEPS = 32
"""Minimum number of steps for a median."""


class SpikeState(Struct, frozen=True):
    """State of a `SpikeDetector` in a checkpoint; `limit` is None for no limit."""

    norms: list[float]
    losses: list[float]
    streak: Whole
    first_bad: Whole | None
    skipped: Whole
    limit: float | None


class SpikeDetector:
    """Running medians of loss and gradient norm, and the number of consecutive bad steps.

    A step is skipped (its update is not applied) if its gradient norm is NaN or Inf, or, with `spike_norm`, more
    than `spike_norm` times the median. A step is bad if it is skipped, or if its loss is NaN or Inf or more than
    `spike_loss` above the median.

    Attributes:
        limit: largest gradient norm allowed in the next steps. It changes only after multiples of `log_every`, so
            it does not depend on other flushes, and a resumed run has the same limit.
        streak: number of consecutive bad steps up to the last step.
        skipped: total number of skipped steps.
        unreported: a warning for each skipped step that has not been printed yet.
        first_bad: first step of the streak.
        last_loss_non_finite: the last step's loss is NaN or Inf.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.limit = math.inf
        self.streak = self.skipped = 0
        self.first_bad: int | None = None
        self.unreported: list[str] = []
        self.last_loss_non_finite = False
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    @property
    def should_stop(self) -> bool:
        """True if there are too many bad steps in a row."""
        return self.streak >= self._config.bad_steps

    def observe(self, line: dict[str, Any]) -> None:
        """Add a step's metrics line to the statistics; set `skipped` in the line of a skipped step."""
        loss, norm = line["loss"], line["grad_norm"]
        self.last_loss_non_finite = loss is None
        skipped = norm is None or norm > self.limit
        if skipped:
            line["skipped"] = True
            self.skipped += 1
            value = ("NaN or Inf" if norm is None else
                     f"{norm:.4g}, above the limit of {self.limit:.4g} (--spike-norm)")
            self.unreported.append(f"step {line['step']} was skipped and changed nothing: its gradient norm is "
                                   f"{value}")
        if skipped or loss is None or self._is_spike(loss):
            self.streak += 1
            self.first_bad = line["step"] if self.streak == 1 else self.first_bad
        else:
            self.streak = 0
        for value, window in ((norm, self._norms), (loss, self._losses)):
            if value is not None:
                window.append(value)
        if line["step"] % self._config.log_every == 0:
            self.limit = self._next_limit()

    def _is_spike(self, loss: float) -> bool:
        allowed = self._config.spike_loss
        return allowed > 0 and len(self._losses) >= MIN_STEPS and loss > statistics.median(self._losses) + allowed

    def _next_limit(self) -> float:
        factor = self._config.spike_norm
        if not factor or len(self._norms) < MIN_STEPS:
            return math.inf
        # Round to float32 as the device does, so that both compare norms with the same limit.
        return struct.unpack("f", struct.pack("f", factor * statistics.median(self._norms)))[0]

    def reason(self) -> str:
        """Describe the consecutive bad steps."""
        last = self._losses[-1] if self._losses else math.nan
        median = statistics.median(self._losses) if self._losses else math.nan
        config = self._config
        limit = (f" (--bad-steps {config.bad_steps}, checked every {config.log_every} steps)"
                 if self.streak > config.bad_steps else "")
        return (f"{self.streak} bad steps in a row{limit}, from step {self.first_bad} on: loss or gradient norm is "
                f"NaN, Inf or far above the median (last loss {last:.4g}, median {median:.4g})")

    def state(self) -> SpikeState:
        """Return the state for a checkpoint."""
        return SpikeState(list(self._norms), list(self._losses), self.streak, self.first_bad, self.skipped,
                          self.limit if math.isfinite(self.limit) else None)

    def restore(self, state: SpikeState) -> None:
        """Restore the state saved in a checkpoint."""
        self._norms, self._losses = deque(state.norms, maxlen=_WINDOW), deque(state.losses, maxlen=_WINDOW)
        self.streak, self.first_bad, self.skipped = state.streak, state.first_bad, state.skipped
        # A run without --spike-norm may be resumed with it, and vice versa.
        self.limit = state.limit if state.limit is not None and self._config.spike_norm else math.inf
