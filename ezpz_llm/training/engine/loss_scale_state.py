"""State of the loss scale of fp16, in checkpoints (imports no torch)."""

from __future__ import annotations

from msgspec import Struct

from ezpz_llm.core.base.records import Whole


class LossScaleState(Struct, frozen=True):
    """State of `ezpz_llm.training.engine.precision.LossScale`: good steps in a row, tolerated overflows left."""

    scale: float
    good_steps: Whole
    tolerated: Whole
