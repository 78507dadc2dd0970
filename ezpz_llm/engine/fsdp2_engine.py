"""The engine of layout fsdp2: torch's fully_shard, which shards every parameter over all ranks by its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist import Dist
from ezpz_llm.engine.gradients import divided_norm_and_clip
from ezpz_llm.engine.optimizer_state import Access, EngineState, Slice
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.engine.torch_engine import TorchEngine
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.gpt import Block
from ezpz_llm.model.parameters import whole


class Fsdp2Engine(TorchEngine):
    """Rows of parameters, gradients and moments on every rank; a block's parameters are gathered while it computes.

    The optimizer steps this rank's rows as plain tensors, which share their storage with the model's parameters.

    Raises:
        UserError: this torch's fully_shard is wrong on a CPU.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 adam: dict[str, Any]) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        dist.ensure_group()
        mesh = DeviceMesh.from_group(dist.mesh.real_group("dp", "sp"), dist.device.type)
        # Blocks one by one; what lies outside of them, a tied table among it, is gathered for the whole pass.
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if dist.device.type == "cpu":
            _sum_and_divide(model)
        self._divided = dict(model.named_parameters())
        self._rows = {name: parameter.to_local().detach() for name, parameter in self._divided.items()}
        rows = [{**group, "params": [self._rows[names[parameter]] for parameter in group["params"]]}
                for group in groups]
        super().__init__(model, resolved, dist, rows, adam)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def forward(self, *inputs: Tensor, last_micro_step: bool) -> Tensor:
        self.module.set_requires_gradient_sync(last_micro_step)
        return self.module(*inputs)

    def _norm_and_clip(self, scale: float) -> Tensor:
        for name, parameter in self._divided.items():
            # A parameter that no loss reached has none; what a run checks of its first step names it.
            self._rows[name].grad = None if parameter.grad is None else parameter.grad.to_local()
            parameter.grad = None
        grads = [rows.grad for rows in self._rows.values() if rows.grad is not None]
        return divided_norm_and_clip(grads, self._mesh, self._optimizer, self._clip, scale)

    def training_state(self) -> EngineState:
        shapes = {name: tuple(parameter.shape) for name, parameter in self._divided.items()}
        return FsdpState(self.module, self._rows, shapes, self._optimizer, *self._replica, self._scale)


def _sum_and_divide(model: nn.Module) -> None:
    """Average gradients without gloo's own average, which in some versions of torch is a sum.

    See github.com/pytorch/pytorch/issues/162338. Adam and clipping hide it: the losses stay right, norms do not.

    Raises:
        UserError: this torch is too old to be told. Some such versions do not get as far as the sum.
    """
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        if not hasattr(part, "set_force_sum_reduction_for_comms"):
            raise UserError(f"fully_shard of torch {torch.__version__} is wrong on a CPU: it fails, or sums "
                            "gradients that it should average", where="layout fsdp2",
                            instead="a newer torch, or --ds-config zero3, which divides as much")
        part.set_force_sum_reduction_for_comms(True)


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
        super().__init__(optimizer, scale)
        self.module, self.rows, self.shapes = module, rows, shapes
        self.rank, self.size = rank, size

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        groups = {rows: group for group in self.optimizer.param_groups for rows in group["params"]}
        for name, rows in self.rows.items():
            if not rows.numel():
                continue
            shape = self.shapes[name]
            start = self.rank * -(-shape[0] // self.size) * math.prod(shape[1:])
            with tensors_of(self.optimizer, groups[rows], rows) as tensors:
                yield Slice(name, shape, whole(shape), start, start + rows.numel(),
                            {kind: tensor.view(-1) for kind, tensor in tensors.items()})

    def loaded(self, optimizer_step: int) -> None:
        super().loaded(optimizer_step)
        # A forward pass without a backward one leaves parameters gathered, with the values from before.
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
