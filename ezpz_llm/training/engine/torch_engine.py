"""Engine for layout ddp: every rank has the whole model, and gradients are averaged over ranks once per step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.gradient_reducer import GradientReducer
from ezpz_llm.training.engine.gradients import norm_and_clip
from ezpz_llm.training.engine.masters import MasterWeights
from ezpz_llm.training.engine.optimizer_state import EngineState, MakeOptimizer, TorchState, set_lr
from ezpz_llm.training.engine.precision import gradient_dtype, parameter_dtype
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Resolved


class TorchEngine(MicroStepEngine):
    """Engine with replicated parameters, gradients and moments.

    A single rank in fp32 uses the gradients of torch. Otherwise, a reducer accumulates and averages them.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        super().__init__(model, resolved, dist)
        self.masters = self._make_masters(model, resolved)
        self._optimizer = make(groups if self.masters is None else self.masters.groups(groups))
        self.step_skip.guard(self._optimizer)
        self._reducer = self._make_reducer(model, resolved)
        self._has_gradients = False

    def _make_masters(self, model: nn.Module, resolved: Resolved) -> MasterWeights | None:
        if not RECIPES[resolved.precision].has_masters:
            return None
        return MasterWeights(model, parameter_dtype(resolved.precision))

    def _make_reducer(self, model: nn.Module, resolved: Resolved) -> GradientReducer | None:
        peers = self._mesh.size("dp", "sp")
        if peers == 1 and self.masters is None:
            return None
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return GradientReducer(trained, self._mesh.group("dp", "sp"), peers,
                               gradient_dtype(resolved.gradients.reduced))

    def _stepped(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each trained parameter, and the tensor that the optimizer steps for it."""
        masters: Mapping[nn.Parameter, Tensor] = self.masters or {}
        return ((parameter, masters.get(parameter, parameter)) for parameter in self.module.parameters())

    def backward(self, loss: Tensor, is_last: bool, retain_graph: bool = False) -> None:
        """Accumulate the micro-batch's gradients, divided by the accumulation steps, times the loss scale."""
        if self._reducer is not None:
            self._reducer.start_backward(is_last)
        (loss / self.batch.accumulation * self._loss_factor).backward(retain_graph=retain_graph)
        if self._reducer is not None:
            self._reducer.finish_backward()
            if is_last:
                self._reducer.finish_reduction()
        self._has_gradients = False

    def show_gradients(self) -> None:
        """Set the attribute `grad` of the tensors that the optimizer steps."""
        if self._has_gradients or self._reducer is None:
            return
        self._has_gradients = True
        for parameter, stepped in self._stepped():
            if parameter in self._reducer:
                stepped.grad = self._reducer.gradient(parameter)

    @property
    def hides_gradients(self) -> bool:
        """True if the master weights have the gradients."""
        return self.masters is not None

    def local_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the whole gradients."""
        return ((parameter, stepped.grad) for parameter, stepped in self._stepped() if stepped.grad is not None)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Remove the gradients of parameters."""
        forgotten = set(parameters)
        for parameter, stepped in self._stepped():
            if parameter in forgotten:
                stepped.grad = None

    def discard_gradients(self) -> None:
        """Remove all gradients."""
        if self._reducer is not None:
            self._reducer.discard()
        for parameter, stepped in self._stepped():
            parameter.grad = stepped.grad = None

    def step(self, lr: float | None) -> Tensor:
        """Clip gradients and step the optimizer; return the global norm (0-d), Inf for a skipped fp16 step."""
        set_lr(self._optimizer, lr)
        self.show_gradients()
        norm = self.step_skip.norm = self._norm_and_clip(self._loss_factor)
        if self._update_scale(norm):
            self._optimizer.step()
        else:
            norm = torch.full_like(norm, float("inf"))
        for _, stepped in self._stepped():
            stepped.grad = None
        if self.masters is not None:
            self.masters.round()
        return norm

    def _norm_and_clip(self, scale: float) -> Tensor:
        return norm_and_clip(self.module, self._mesh, self._optimizer, self.clip, scale, self.masters or {})

    def training_state(self) -> EngineState:
        """Return the parameters and optimizer state, which are replicated on all ranks."""
        return TorchState(self.module, self._optimizer, *self._replica, self.loss_scale, self.masters)
