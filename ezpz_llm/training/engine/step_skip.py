"""Skipping of optimizer steps whose gradient norm is non-finite or above a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.training.dist.torch_internals import supports_grad_scale
from ezpz_llm.training.engine.group_norms import GroupNorms
from ezpz_llm.training.engine.optimizer_state import EngineState


class NonFiniteStepSkipper:
    """Hook that skips steps whose global gradient norm is NaN, Inf or above `limit`.

    All ranks have the same norm and limit, so they decide without communication. torch's fused optimizers read the
    decision on the device, from the flag for gradient scalers, without synchronization. For other optimizers, the
    CPU reads it.

    A skipped step changes neither parameters, nor moments, nor the optimizer's step count.

    Attributes:
        limit: limit of the norm before clipping; infinity skips only NaN and Inf.
        norm: norm of the next step, for engines that compute it themselves.
        at_step: called once, before the next step.
        last_measured: latest result of `measured`.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit = math.inf
        self.norm: Tensor | None = None
        self.at_step: Callable[[], None] | None = None
        self.last_measured: GroupNorms | None = None
        self._measuring: GroupNorms | None = None
        self._device = device
        self._get_norm: Callable[[], Tensor | float] | None = None
        self._removed: list[tuple[Tensor, Tensor]] = []

    def guard(self, optimizer: torch.optim.Optimizer, get_norm: Callable[[], Tensor | float] | None = None) -> None:
        """Install the hooks in an optimizer.

        Args:
            get_norm: returns the global gradient norm of the next step; default: `norm`.
        """
        self._get_norm = get_norm
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def measure(self, state: EngineState) -> None:
        """Measure norms by decay group in the next step.

        Args:
            state: the engine's state, which must not be offloaded to files.
        """
        self._measuring = GroupNorms(state, self._device)

    def call_at_step(self) -> None:
        """Call `at_step` if pending; engines call this at the start of a step or before the optimizer step."""
        if self.at_step is not None:
            self.at_step()
            self.at_step = None

    def measured(self) -> GroupNorms | None:
        """Return the norms since `measure`, and stop measuring; None if `measure` was not called."""
        norms, self._measuring = self._measuring, None
        if norms is not None:
            norms.close()
        self.last_measured = norms
        return norms

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.call_at_step()
        norm = self.norm if self._get_norm is None else self._get_norm()
        # Not `norm > limit`, which is false for NaN; without a limit, only a finite norm passes.
        skip = ~(torch.as_tensor(norm, device=self._device) <= min(self.limit, torch.finfo(torch.float32).max))
        if supports_grad_scale(optimizer):
            optimizer.found_inf = skip.float()
        elif bool(skip):
            self._remove_gradients(optimizer)
        if self._measuring is not None:
            self._measuring.before(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._removed:
            parameter.grad = gradient
        self._removed = []
        if self._measuring is not None:
            self._measuring.after()

    def _remove_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove all gradients until `_after`, because optimizers ignore parameters without a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._removed.append((parameter, parameter.grad))
                    parameter.grad = None
