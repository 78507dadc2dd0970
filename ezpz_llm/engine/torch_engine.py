"""Engine for layout ddp: torch's DistributedDataParallel, or the bare model on a single rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ezpz_llm.base import UserError
from ezpz_llm.dist import Dist
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.engine.gradients import norm_and_clip
from ezpz_llm.engine.masters import MasterWeights
from ezpz_llm.engine.optimizer_state import EngineState, MakeOptimizer, TorchState, set_lr
from ezpz_llm.engine.precision import gradient_dtype, parameter_dtype
from ezpz_llm.layout.precision_recipes import RECIPES
from ezpz_llm.layout.resolve import Resolved


class TorchEngine(MicroStepEngine):
    """Engine with replicated parameters, gradients and moments; gradients are averaged once per step.

    If parameters have 16 bits, the master weights hold and average the gradients; otherwise DDP does.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        super().__init__(model, resolved, dist)
        self.masters = self._make_masters(model, resolved)
        self._optimizer = make(groups if self.masters is None else self.masters.groups(groups))
        self.step_skip.guard(self._optimizer)
        self._wrapped = self._wrap(model)

    def _make_masters(self, model: nn.Module, resolved: Resolved) -> MasterWeights | None:
        if not RECIPES[resolved.precision].has_masters:
            return None
        return MasterWeights(model, parameter_dtype(resolved.precision), self._mesh.group("dp", "sp"),
                             self._mesh.size("dp", "sp"), gradient_dtype(resolved.gradients.reduced))

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._mesh.size("dp", "sp") == 1 or self.masters is not None:
            return model
        # All ranks already have the same values, and DDP cannot broadcast buffers of some dtypes, such as int16.
        wrapped = DistributedDataParallel(
            model, device_ids=None if self.device.index is None else [self.device.index],
            process_group=self._mesh.group("dp", "sp"), gradient_as_bucket_view=True, init_sync=False)
        # No other layout broadcasts rank 0's buffers before each pass. The argument is deprecated since torch 2.13;
        # the attribute exists in every version.
        wrapped.broadcast_buffers = False
        return wrapped

    def forward(self, *inputs: Any, last_micro_step: bool, **named: Any) -> Any:
        """Return the loss of a micro-batch; gradients are reduced only in the backward pass of the last one."""
        # DDP reads the flag in the forward pass, so set it first.
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.require_backward_grad_sync = last_micro_step
        elif self.masters is not None:
            self.masters.reduces = last_micro_step
        try:
            return self._wrapped(*inputs, **named)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise UserError("the loss of the last micro-batch does not depend on every parameter",
                            where="layout ddp", instead="a loss that does, or zero1, which uses zero as a missing "
                                                        "gradient") from error

    def backward(self, loss: Tensor) -> None:
        """Accumulate the micro-batch's gradients, divided by the accumulation steps, times the loss scale."""
        (loss / self.batch.accumulation * self._loss_factor).backward()
        if self.masters is not None:
            self.masters.finish_backward()

    def step(self, lr: float | None) -> Tensor:
        """Clip gradients and step the optimizer; return the global norm (0-d), Inf for a skipped fp16 step."""
        set_lr(self._optimizer, lr)
        if self.masters is not None:
            self.masters.finish_reduction()
        norm = self.step_skip.norm = self._norm_and_clip(self._loss_factor)
        if self._update_scale(norm):
            self._optimizer.step()
        else:
            norm = torch.full_like(norm, float("inf"))
        if self.masters is None:
            self._optimizer.zero_grad()
        else:
            self.masters.round()
        return norm

    def _norm_and_clip(self, scale: float) -> Tensor:
        return norm_and_clip(self.module, self._mesh, self._optimizer, self._clip, scale, self.masters or {})

    def training_state(self) -> EngineState:
        """Return the parameters and optimizer state, which are replicated on all ranks."""
        return TorchState(self.module, self._optimizer, *self._replica, self._scale, self.masters)
