"""What every engine offers the training loop, whatever spreads the model over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ezpz_llm.engine.batch import Batch
from ezpz_llm.engine.layout import Layout

if TYPE_CHECKING:
    from ezpz_llm.engine.checkpoint.slices import EngineState


class Engine(ABC):
    """A model in training: forward and backward once a micro batch, step once a step.

    `module` is the plain model, whose parameters the engine may have partitioned; calling it is right in
    evaluation only, and then on every rank. Its forward pass has the engine's precision wherever it is called.
    `skipped_steps` counts the steps whose fp16 gradients overflowed, which changed nothing but the loss scale.
    """

    module: nn.Module
    device: torch.device
    layout: Layout
    batch: Batch
    skipped_steps: int = 0

    @abstractmethod
    def forward(self, *inputs: Tensor, last_micro_step: bool) -> Tensor:
        """The mean loss of one micro batch, 0-d in fp32.

        `last_micro_step` is true for the last micro batch of a step: where gradients are reduced only once a step,
        they are reduced in the backward pass that follows.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that `forward` gave, divided by the number of micro-steps."""

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Clip, update with this learning rate, and forget the gradients.

        Returns:
            The global gradient norm before clipping, 0-d on the device; infinite for a skipped fp16 step.
        """

    @abstractmethod
    def training_state(self) -> EngineState:
        """What a checkpoint holds of this rank."""

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module in evaluation mode without gradients; in training mode again afterwards.

        Every rank must make the same calls inside: a forward pass may be collective.
        """
        self.module.eval()
        try:
            with torch.no_grad():
                yield self.module
        finally:
            self.module.train()
