"""Limit on the gradient norm of the next steps, from the losses and gradient norms so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.spike_detector import SpikeDetector, SpikeState


class SpikeGuard(Callback):
    """Spike detection. The training loop calls `try_rollback` when the detector finds too many bad steps.

    Attributes:
        rollbacks: checkpoint step of each rollback, in order.
    """

    name = "guard"

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self.detector = SpikeDetector(config)
        self.rollbacks: list[int] = []
        self._engine = engine

    def on_log(self, context: CallbackContext, lines: Sequence[dict[str, Any]]) -> None:
        """Detect bad steps, mark skipped ones in their lines, and set the limit of the next steps."""
        for line in lines:
            self.detector.observe(line)
        self._engine.step_skip.limit = self.detector.limit
        for skipped in self.detector.unreported:
            context.print(f"warning: {skipped}")
        self.detector.unreported = []

    def state_dict(self) -> dict[str, Any]:
        """Return the detector's state."""
        return as_plain(self.detector.state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the detector and the limit."""
        self.detector.restore(as_record(SpikeState, state, "state.json", self.name))
        self._engine.step_skip.limit = self.detector.limit
