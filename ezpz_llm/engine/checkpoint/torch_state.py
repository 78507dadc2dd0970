"""The training state where torch's own optimizer steps the model's parameters: one process, DDP, and ZeRO 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ezpz_llm.engine.checkpoint import moments
from ezpz_llm.engine.checkpoint.slices import EngineState, Slice, cut
from ezpz_llm.model.placement import placement_of

if TYPE_CHECKING:
    from ezpz_llm.engine.precision import LossScale


class TorchState(EngineState):
    """Every data-parallel rank holds every parameter of its part of the model whole.

    Args:
        module: the plain model, below any wrapper.
        optimizer: the optimizer whose parameters are the module's.
        rank, world_size: among the data-parallel ranks, which share the writing.
        scale: the loss scale of fp16, if there is one.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int,
                 scale: LossScale | None) -> None:
        super().__init__(scale)
        self.placed = [(parameter, placement_of(name, parameter)) for name, parameter in module.named_parameters()]
        self.shapes = {at.name: at.shape for _, at in self.placed}
        self.optimizer = optimizer
        self.rank, self.world_size = rank, world_size

    def slices(self) -> Iterator[Slice]:
        return self._slices(moments.at_hand)

    def extents(self) -> Iterator[Slice]:
        return self._slices(moments.extent)

    def _slices(self, tensors_of: moments.Access) -> Iterator[Slice]:
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        for parameter, at in self.placed:
            with tensors_of(self.optimizer, groups[parameter], parameter) as tensors:
                flat = {kind: tensor.view(-1) for kind, tensor in tensors.items()}
                yield from cut(at, 0, parameter.numel(), flat, replica=self.rank, replicas=self.world_size)

    @property
    def optimizer_step(self) -> int:
        return moments.get_step(self.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        moments.set_step(self.optimizer, optimizer_step)
