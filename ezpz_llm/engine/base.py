"""What every engine offers the training loop, whatever spreads the model over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.dist import Dist
from ezpz_llm.engine.gradients import NonFiniteStepSkipper
from ezpz_llm.engine.masters import MasterWeights
from ezpz_llm.engine.optimizer_state import EngineState
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.layout.precision_recipes import RECIPES
from ezpz_llm.layout.resolve import Resolved

Span = Callable[[str], AbstractContextManager[None]]
"""Times what happens inside: "forward", "backward" or "optimizer"."""


class Engine(ABC):
    """A model in training.

    `module` is the part of the plain model that this rank computes, whose parameters the engine may have
    partitioned. Its forward pass has the engine's precision wherever it is called. `skipped_steps` counts the steps
    whose fp16 gradients overflowed, which changed nothing but the loss scale. `step_skip` skips steps whose
    gradient norm is non-finite or above a limit, which then change nothing at all. `masters` are the fp32 weights
    that the optimizer steps, where an engine of ours keeps them beside the parameters.
    """

    masters: MasterWeights | None = None

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist) -> None:
        self.module, self.device = model, dist.device
        self.layout, self.batch = resolved.layout, resolved.batch
        self.step_skip = NonFiniteStepSkipper(dist.device)
        self.skipped_steps = 0
        self._mesh, self._clip = dist.mesh, resolved.clip
        # Number among the ranks that share this rank's part of the model, and how many these are.
        self._replica: tuple[int, int] = dist.mesh.place("dp", "sp")
        self._scale = LossScale(resolved.loss_scale) if RECIPES[resolved.precision].scales_loss else None

    @property
    def _loss_factor(self) -> float:
        """The loss scale of fp16; 1 in other precisions."""
        return 1.0 if self._scale is None else self._scale.scale

    def _update_scale(self, norm: Tensor) -> bool:
        """Adjust the loss scale of fp16 to a step's gradient norm; False if an overflow skips the step."""
        if self._scale is None:
            return True
        finite = bool(torch.isfinite(norm))
        self._scale.update(finite)
        self.skipped_steps += not finite
        return finite

    @abstractmethod
    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        """One optimizer step with this learning rate on `batch.accumulation` micro batches.

        Args:
            micro_batches: this rank's; each has the arguments of the model's forward pass, tokens and targets.

        Returns:
            This rank's part of the loss, whose mean over all ranks is the loss of the step; and the global gradient
            norm before clipping, infinite for a skipped fp16 step. Both 0-d on the device.
        """

    @abstractmethod
    def training_state(self) -> EngineState:
        """What a checkpoint holds of this rank. Collective."""

    def own_parameters(self) -> Iterable[Tensor]:
        """What this rank holds of the parameters between steps; gathered ones come on top."""
        return self.module.parameters()

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of a batch, or this rank's part of it, 0-d; all ranks of a model's copy make the call."""
        return self.module(tokens, targets, reduction="sum")

    def row_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The same for each sequence of a batch, (B,). The sequence-parallel degree has to divide their length."""
        return self.module(tokens, targets, reduction="rows")

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the token after (B, T), the same on every rank; all ranks make the call."""
        return self.module(tokens, last_only=True)[:, -1]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients inside; training mode again afterwards."""
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()


class MicroStepEngine(Engine):
    """An engine that takes one micro batch at a time, forward and backward."""

    @abstractmethod
    def forward(self, *inputs: Any, last_micro_step: bool, **named: Any) -> Any:
        """What the module gives for one micro batch; of our models its mean loss, 0-d in fp32.

        `last_micro_step` is true for the last micro batch of a step: where gradients are reduced only once a step,
        they are reduced in the backward pass that follows.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that `forward` gave, divided by the number of micro-steps."""

    @abstractmethod
    def step(self, lr: float | None) -> Tensor:
        """Clip, update with this learning rate, or each group with its own, and forget the gradients; the global
        gradient norm before."""

    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        """Forward and backward of each micro batch, then the optimizer's step; (mean loss, global gradient
        norm).
        """
        accumulation = self.batch.accumulation
        loss = torch.zeros((), device=self.device)
        for index, inputs in enumerate(micro_batches):
            with span("forward"):
                micro_loss = self.forward(*inputs, last_micro_step=index == accumulation - 1)
            with span("backward"):
                self.backward(micro_loss)
            loss += micro_loss.detach() / accumulation
        with span("optimizer"):
            self.step_skip.look()
            norm = self.step(lr)
        return loss, norm
