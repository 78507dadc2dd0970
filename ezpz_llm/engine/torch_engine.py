"""The engine of layout ddp: torch's DistributedDataParallel, or the bare model where there is one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ezpz_llm.dist import Dist
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.engine.gradients import norm_and_clip
from ezpz_llm.engine.optimizer_state import EngineState, TorchState, make_optimizer, set_lr
from ezpz_llm.layout.resolve import Resolved


class TorchEngine(MicroStepEngine):
    """Whole parameters, gradients and moments on every rank; gradients averaged once a step."""

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 adam: dict[str, Any]) -> None:
        super().__init__(model, resolved, dist)
        self._optimizer = make_optimizer(groups, adam, resolved.optimizer)
        self.step_skip.guard(self._optimizer)
        self._wrapped = self._wrap(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._mesh.size("dp", "sp") == 1:
            return model
        return DistributedDataParallel(
            model, device_ids=None if self.device.index is None else [self.device.index],
            process_group=self._mesh.group("dp", "sp"), gradient_as_bucket_view=True)

    def forward(self, *inputs: Tensor, last_micro_step: bool) -> Tensor:
        # The forward pass decides whether the backward pass reduces: the flag comes first.
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.require_backward_grad_sync = last_micro_step
        return self._wrapped(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.batch.accumulation * self._loss_factor).backward()

    def step(self, lr: float) -> Tensor:
        set_lr(self._optimizer, lr)
        norm = self.step_skip.norm = self._norm_and_clip(self._loss_factor)
        if self._update_scale(norm):
            self._optimizer.step()
        else:
            norm = torch.full_like(norm, float("inf"))
        self._optimizer.zero_grad()
        return norm

    def _norm_and_clip(self, scale: float) -> Tensor:
        return norm_and_clip(self.module, self._mesh, self._optimizer, self._clip, scale)

    def training_state(self) -> EngineState:
        return TorchState(self.module, self._optimizer, *self._replica, self._scale)
