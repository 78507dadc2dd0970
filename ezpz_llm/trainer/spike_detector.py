"""Steps that go wrong: what counts as one, and when there were too many in a row (imports no torch).

Nothing here costs the step anything. Losses and norms are looked at where they are flushed, `--log-every` steps at
a time, already reduced over ranks, so that all ranks come to the same conclusion at the same step without asking
each other. The limit on the gradient norm that follows holds for the steps after; the engine's gate applies it on
the device (engine/gradients.py). The price is the delay: up to `--log-every` steps follow one that goes wrong.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections import deque
from typing import Any

from ezpz_llm.trainer.config import TrainConfig

WINDOW = 128
"""Steps whose median is the usual loss or norm."""
LEAST = 32
"""Steps from which on there is one."""


class Guard:
    """What is usual in a run, and how many steps in a row were not.

    A step is refused (its update is not made) if its gradient norm is no number, or, where asked for, more than
    `spike_norm` times the usual. It is bad if it is refused, or its loss is no number or more than `spike_loss`
    above the usual.

    Attributes:
        limit: the largest gradient norm of the next steps. It changes only after multiples of `log_every`, so that
            it does not depend on what else flushes, and a resumed run has the same.
        streak: bad steps up to now without a good one between them.
        refused: steps that were refused in all.
        untold: those that nobody has been told of yet, each as a sentence.
        first_bad: the step that began the streak.
        ends_in_nothing: whether the last step's loss is no number.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.limit = math.inf
        self.streak = self.refused = 0
        self.first_bad: int | None = None
        self.untold: list[str] = []
        self.ends_in_nothing = False
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def is_over(self) -> bool:
        """Whether there were too many bad steps in a row."""
        return self.streak >= self._config.bad_steps

    def look(self, line: dict[str, Any]) -> None:
        """Take a step's metrics line into account; one that was refused gets the member `skipped`."""
        loss, norm = line["loss"], line["grad_norm"]
        self.ends_in_nothing = loss is None
        refused = norm is None or norm > self.limit
        if refused:
            line["skipped"] = True
            self.refused += 1
            why = "no number" if norm is None else f"{norm:.4g}, above the limit of {self.limit:.4g} (--spike-norm)"
            self.untold.append(f"step {line['step']} was skipped and changed nothing: its gradient norm is {why}")
        if refused or loss is None or self._spikes(loss):
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
        # Rounded as the device rounds it, so that host and device agree on every norm.
        return struct.unpack("f", struct.pack("f", factor * statistics.median(self._norms)))[0]

    def why(self) -> str:
        """What is wrong with the steps of the streak."""
        last = self._losses[-1] if self._losses else math.nan
        usual = statistics.median(self._losses) if self._losses else math.nan
        return (f"{self.streak} bad steps in a row, from step {self.first_bad} on: the loss or the gradient is no "
                f"number or far above the usual (last loss {last:.4g}, median {usual:.4g})")

    def state(self) -> dict[str, Any]:
        """For a checkpoint, in JSON's types."""
        return {"norms": list(self._norms), "losses": list(self._losses), "streak": self.streak,
                "first_bad": self.first_bad, "refused": self.refused,
                "limit": self.limit if math.isfinite(self.limit) else None}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's; None, for one that has none, starts anew."""
        if state is None:
            state = Guard(self._config).state()
        self._norms.clear()
        self._norms.extend(state["norms"])
        self._losses.clear()
        self._losses.extend(state["losses"])
        self.streak, self.first_bad, self.refused = state["streak"], state["first_bad"], state["refused"]
        # One that skipped only what is no number may go on as one that was asked for more, and the other way round.
        is_limited = state["limit"] is not None and self._config.spike_norm
        self.limit = state["limit"] if is_limited else math.inf


