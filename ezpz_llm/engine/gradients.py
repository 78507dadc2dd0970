"""Gradient norm, clipping, and the check of norm and loss that may skip the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.dist.private_names import foreach_div_, foreach_norm
from ezpz_llm.engine.group_norms import GroupNorms
from ezpz_llm.engine.optimizer_state import EngineState
from ezpz_llm.model.parameters import placement_of


def norm_and_clip(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                  loss_scale: float = 1.0) -> Tensor:
    """Have the next step made on gradients without the loss scale, of a global norm of at most `clip` (0: any).

    For gradients that data-parallel ranks hold alike. Collective over the ranks that hold different parts of the
    model. What several of them hold counts once.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device, which is not waited for.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]
    grads = [parameter.grad for _, parameter in named]
    mine = [parameter.grad for name, parameter in named if placement_of(name, parameter).primary]
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(mine)))
    if mesh.size("pp", "tp") > 1:
        square = norm.square()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt()
    norm = norm / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def divided_norm_and_clip(grads: list[Tensor], mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                          loss_scale: float = 1.0) -> Tensor:
    """The same for gradients that are divided over data-parallel ranks. Collective over them."""
    square = torch.stack(foreach_norm(grads)).square().sum()
    if mesh.size("dp", "sp") > 1:
        torch.distributed.all_reduce(square, group=mesh.group("dp", "sp"))
    norm = square.sqrt() / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def _scale(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, clip: float,
           loss_scale: float) -> None:
    """torch's fused optimizers divide as they read, which spares a pass over all gradients; for others, divide."""
    divisor = None
    if clip > 0:
        # The same small term as torch.nn.utils.clip_grad_norm_ and DeepSpeed have.
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) * loss_scale
    elif loss_scale != 1.0:
        divisor = torch.full_like(norm, loss_scale)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor
    elif divisor is not None:
        foreach_div_(grads, divisor)


# What stands between a gradient and the optimizer's step: a limit on its norm, and a look at both on some steps.
class NonFiniteStepSkipper:
    """Skips steps whose global gradient norm is NaN, Inf or above `limit`.

    Every rank has the same norm and the same limit, and so comes to the same answer without asking. Torch's fused
    optimizers get it on the device, by the flag that gradient scalers use, and nothing waits for it; for others it
    is read on CPU.

    A skipped step leaves parameters, moments and the optimizer's count of steps as they were.

    Attributes:
        limit: of the norm before clipping; infinity skips only NaN and Inf.
        norm: of the step that is about to be made, for engines that find it themselves.
        at_step: called once, before the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit = math.inf
        self.norm: Tensor | None = None
        self.at_step: Callable[[], None] | None = None
        self._measuring: GroupNorms | None = None
        self._device = device
        self._ask: Callable[[], Tensor | float] | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []

    def guard(self, optimizer: torch.optim.Optimizer, ask: Callable[[], Tensor | float] | None = None) -> None:
        """Stand before this optimizer's steps.

        Args:
            ask: gives the global gradient norm of the step that is about to be made, in place of `norm`.
        """
        self._ask = ask
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def measure(self, state: EngineState) -> None:
        """Measure the next step by decay group.

        Args:
            state: the engine's, not kept in files.
        """
        self._measuring = GroupNorms(state, self._device)

    def measured(self) -> GroupNorms | None:
        """What was found since `measure`, which ends here; None where nothing was asked for."""
        found, self._measuring = self._measuring, None
        if found is not None:
            found.close()
        return found

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.at_step is not None:
            self.at_step()
            self.at_step = None
        norm = self.norm if self._ask is None else self._ask()
        refused = ~(torch.as_tensor(norm, device=self._device) <= self.limit)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = refused.float()
        elif bool(refused):
            self._take_gradients(optimizer)
        if self._measuring is not None:
            self._measuring.before(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if self._measuring is not None:
            self._measuring.after()

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """A parameter without a gradient is left alone by every optimizer."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._aside.append((parameter, parameter.grad))
                    parameter.grad = None
