"""Interface between engines and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.masters import MasterWeights
from ezpz_llm.training.engine.optimizer_state import EngineState
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.engine.step_skip import NonFiniteStepSkipper
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Resolved

Span = Callable[[str], AbstractContextManager[None]]
"""Function that returns a context manager to time a phase: "forward", "backward" or "optimizer"."""


class Engine(ABC):
    """Model in training.

    Attributes:
        module: this rank's part of the plain model, whose parameters the engine may have partitioned. Its forward
            pass uses the engine's precision, also if it is called directly.
        clip: limit of the gradient norm; 0 if gradients are not clipped.
        loss_scale: loss scale of fp16; None in other precisions.
        skipped_steps: number of steps whose fp16 gradients overflowed; such steps change only the loss scale.
        step_skip: skips steps whose gradient norm is non-finite or above a limit; such steps have no effect.
        masters: fp32 master weights that the optimizer steps; None if the engine does not keep them itself.
        may_have_unused: True if the loss of a micro-batch may not depend on every parameter. ezpz_llm's models use
            all parameters.
    """

    masters: MasterWeights | None = None
    may_have_unused = False

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist) -> None:
        self.module, self.device = model, dist.device
        self.layout, self.batch = resolved.layout, resolved.batch
        self.step_skip = NonFiniteStepSkipper(dist.device)
        self.skipped_steps = 0
        self._mesh, self.clip = dist.mesh, resolved.clip
        # This rank's index among the ranks with the same part of the model, and their number.
        self._replica: tuple[int, int] = dist.mesh.place("dp", "sp")
        self.loss_scale = LossScale(resolved.loss_scale) if RECIPES[resolved.precision].scales_loss else None

    @property
    def _loss_factor(self) -> float:
        """Loss scale of fp16; 1 in other precisions."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _update_scale(self, norm: Tensor) -> bool:
        """Update the fp16 loss scale from a step's gradient norm; return False if an overflow skips the step."""
        if self.loss_scale is None:
            return True
        finite = bool(torch.isfinite(norm))
        self.loss_scale.update(finite)
        self.skipped_steps += not finite
        return finite

    @abstractmethod
    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        """Perform an optimizer step on `batch.accumulation` micro-batches.

        Args:
            micro_batches: this rank's micro-batches; each has the arguments of the model's forward pass, tokens and
                targets.

        Returns:
            This rank's part of the loss, whose mean over all ranks is the loss of the step, and the global gradient
            norm before clipping, infinite for a skipped fp16 step. Both are 0-d on the device.
        """

    @abstractmethod
    def training_state(self) -> EngineState:
        """Return this rank's training state, as saved in a checkpoint. Collective."""

    def own_parameters(self) -> Iterable[Tensor]:
        """Return the parameter shards that this rank holds between steps, without gathered parameters."""
        return self.module.parameters()

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a batch, or this rank's part of it, 0-d. Collective in a model replica."""
        return self.module(tokens, targets, reduction="sum")

    def row_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of each sequence, (B,), or this rank's part of it. Collective in a model replica.

        The length of the sequences must be divisible by the sequence-parallel degree.
        """
        return self.module(tokens, targets, reduction="rows")

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, V) of the next token after (B, T), the same on every rank. Collective."""
        return self.module(tokens, last_only=True)[:, -1]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode without gradients, and back to training mode on exit."""
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()


class MicroStepEngine(Engine):
    """Engine that computes one micro-batch at a time, forward and backward."""

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool, retain_graph: bool = False) -> None:
        """Accumulate the gradient of a loss, divided by the number of micro-steps.

        Forward passes are calls of `module`, in any order.

        Args:
            is_last: True for the last backward pass of a step, after which gradients are averages over ranks.
                Engines that reduce gradients once per step reduce them in this pass.
            retain_graph: keep the graph for another backward pass.
        """

    @abstractmethod
    def show_gradients(self) -> None:
        """Make the averaged gradients available, after the last backward pass of a step."""

    @property
    def hides_gradients(self) -> bool:
        """True if the averaged gradients are not in `grad` of the parameters."""
        return False

    @property
    def gradient_groups(self) -> tuple[ProcessGroup | None, ...]:
        """Groups over which the averaged gradients are divided, besides tp; None is the world."""
        return ()

    @abstractmethod
    def local_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the averaged gradients of the step, or this rank's elements of them, for all trained parameters.

        Changes in place take effect in the step.
        """

    @abstractmethod
    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Make the step ignore parameters, as torch's optimizers ignore parameters without a gradient.

        Call it between the last backward pass and the step, with the same parameters on every rank.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Discard the gradients since the last step."""

    def release(self) -> None:
        """Make the memory of the engine collectable, when its model is not used any more."""

    @abstractmethod
    def step(self, lr: float | None) -> Tensor:
        """Clip gradients, perform an optimizer step, and clear gradients.

        Args:
            lr: learning rate; None keeps the learning rate of each parameter group.

        Returns:
            The global gradient norm before clipping, 0-d.
        """

    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        """Perform an optimizer step on accumulated micro-batches; return mean loss and global gradient norm."""
        accumulation = self.batch.accumulation
        loss = torch.zeros((), device=self.device)
        for index, inputs in enumerate(micro_batches):
            with span("forward"):
                micro_loss = self.module(*inputs)
            with span("backward"):
                self.backward(micro_loss, is_last=index == accumulation - 1)
            loss += micro_loss.detach() / accumulation
        with span("optimizer"):
            self.step_skip.call_at_step()
            norm = self.step(lr)
        return loss, norm
