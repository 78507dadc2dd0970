"""Data of a run, and the position in the order of its samples."""

from __future__ import annotations

from dataclasses import dataclass

from ezpz_llm.training.data.samples import Batches, ValidationWindows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.trainer.position import Position


@dataclass
class RunData:
    """Tokens of a run, its training batches and validation windows, and the samples consumed so far."""

    tokens: TokenData
    batches: Batches
    validation: ValidationWindows
    position: Position

    @property
    def consumed_tokens(self) -> int:
        """Number of training tokens consumed so far, over all ranks."""
        return self.position.consumed * self.batches.block_size
