"""The training state under torch's fully_shard: each rank holds some rows of every parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from ezpz_llm.engine.checkpoint import moments
from ezpz_llm.engine.checkpoint.slices import EngineState, Slice
from ezpz_llm.model.placement import whole

if TYPE_CHECKING:
    from ezpz_llm.engine.precision import LossScale


class FsdpState(EngineState):
    """Rows of every parameter, as torch.chunk deals them: equally many to each rank, until none is left.

    Args:
        module: the divided model.
        rows: by the parameter's name, what this rank holds and the optimizer steps.
        shapes: of the whole parameters.
        rank, size: among the ranks that the rows are divided over.
        scale: the loss scale of fp16, if there is one.
    """

    def __init__(self, module: torch.nn.Module, rows: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]],
                 optimizer: torch.optim.Optimizer, rank: int, size: int, scale: LossScale | None) -> None:
        super().__init__(scale)
        self.module = module
        self.rows, self.shapes, self.optimizer = rows, shapes, optimizer
        self.rank, self.size = rank, size

    def slices(self) -> Iterator[Slice]:
        return self._slices(moments.at_hand)

    def extents(self) -> Iterator[Slice]:
        return self._slices(moments.extent)

    def _slices(self, tensors_of: moments.Access) -> Iterator[Slice]:
        groups = {rows: group for group in self.optimizer.param_groups for rows in group["params"]}
        for name, rows in self.rows.items():
            if not rows.numel():
                continue
            shape = self.shapes[name]
            start = self.rank * -(-shape[0] // self.size) * math.prod(shape[1:])
            with tensors_of(self.optimizer, groups[rows], rows) as tensors:
                yield Slice(name, shape, whole(shape), start, start + rows.numel(),
                            {kind: tensor.view(-1) for kind, tensor in tensors.items()})

    @property
    def optimizer_step(self) -> int:
        return moments.get_step(self.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        moments.set_step(self.optimizer, optimizer_step)
        # A forward pass without a backward one leaves parameters gathered, with the values from before.
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
