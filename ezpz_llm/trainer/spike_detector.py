"""Detection of loss and gradient-norm spikes, and of too many bad steps in a row (imports no torch).

Nothing here costs the step anything. Losses and gradient norms are observed where they are flushed, `--log-every`
steps at a time, already reduced over ranks, so that all ranks come to the same conclusion at the same step without
asking each other. The limit on the gradient norm that follows holds for the steps after; the engine applies it on
the device (engine/gradients.py). The price is the delay: up to `--log-every` steps follow a bad one.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections import deque
from typing import Any

from ezpz_llm.trainer.config import TrainConfig

WINDOW = 128
"""Steps over which the medians of loss and gradient norm are taken."""
LEAST = 32
"""Steps before there is a median."""


class SpikeDetector:
    """Running medians of loss and gradient norm, and the number of bad steps in a row.

    A step is skipped (its update is not made) if its gradient norm is NaN or Inf, or, where asked for, more than
    `spike_norm` times the median. It is bad if it is skipped, or its loss is NaN or Inf or more than `spike_loss`
    above the median.

    Attributes:
        limit: the largest gradient norm of the next steps. It changes only after multiples of `log_every`, so that
            it does not depend on what else flushes, and a resumed run has the same.
        streak: bad steps up to now without a good one between them.
        skipped: steps that were skipped in all.
        unreported: those that no warning has named yet, each as a sentence.
        first_bad: the step that began the streak.
        last_loss_non_finite: whether the last step's loss is NaN or Inf.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.limit = math.inf
        self.streak = self.skipped = 0
        self.first_bad: int | None = None
        self.unreported: list[str] = []
        self.last_loss_non_finite = False
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def should_stop(self) -> bool:
        """True if there are too many bad steps in a row."""
        return self.streak >= self._config.bad_steps

    def observe(self, line: dict[str, Any]) -> None:
        """Take a step's metrics line into account; add the member `skipped` to that of a skipped step."""
        loss, norm = line["loss"], line["grad_norm"]
        self.last_loss_non_finite = loss is None
        skipped = norm is None or norm > self.limit
        if skipped:
            line["skipped"] = True
            self.skipped += 1
            found = ("NaN or Inf" if norm is None else
                     f"{norm:.4g}, above the limit of {self.limit:.4g} (--spike-norm)")
            self.unreported.append(f"step {line['step']} was skipped and changed nothing: its gradient norm is "
                                   f"{found}")
        if skipped or loss is None or self._spikes(loss):
            self.streak += 1
            self.first_bad = line["step"] if self.streak == 1 else self.first_bad
        else:
            self.streak = 0
        for value, window in ((norm, self._norms), (loss, self._losses)):
            if value is not None:
                window.append(value)
        if line["step"] % self._config.log_every == 0:
            self.limit = self._next_limit()

    def _spikes(self, loss: float) -> bool:
        allowed = self._config.spike_loss
        return allowed > 0 and len(self._losses) >= LEAST and loss > statistics.median(self._losses) + allowed

    def _next_limit(self) -> float:
        factor = self._config.spike_norm
        if not factor or len(self._norms) < LEAST:
            return math.inf
        # Rounded as the device rounds it, so that CPU and device agree on every norm.
        return struct.unpack("f", struct.pack("f", factor * statistics.median(self._norms)))[0]

    def reason(self) -> str:
        """Describe the bad steps in a row."""
        last = self._losses[-1] if self._losses else math.nan
        usual = statistics.median(self._losses) if self._losses else math.nan
        return (f"{self.streak} bad steps in a row, from step {self.first_bad} on: loss or gradient norm is NaN, "
                f"Inf or far above the median (last loss {last:.4g}, median {usual:.4g})")

    def state(self) -> dict[str, Any]:
        """For a checkpoint, in JSON's types."""
        return {"norms": list(self._norms), "losses": list(self._losses), "streak": self.streak,
                "first_bad": self.first_bad, "refused": self.skipped,
                "limit": self.limit if math.isfinite(self.limit) else None}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from the state in a checkpoint; None, for one without it, starts anew."""
        if state is None:
            state = SpikeDetector(self._config).state()
        self._norms, self._losses = (deque(state[name], maxlen=WINDOW) for name in ("norms", "losses"))
        self.streak, self.first_bad, self.skipped = state["streak"], state["first_bad"], state["refused"]
        # A run that skipped only NaN and Inf may be resumed with --spike-norm, and the other way round.
        is_limited = state["limit"] is not None and self._config.spike_norm
        self.limit = state["limit"] if is_limited else math.inf
