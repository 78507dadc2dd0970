"""Gradients as `grad` of the parameters, between the last backward pass of a step and the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.library.gradient_handle import GradientHandle, Groups
from ezpz_llm.training.model.parameters import placement_of, whole_box


class VisibleGradients:
    """Gradients that a script may read and change.

    Where the gradient of a parameter is a plain tensor or a DTensor of torch, it is visible anyway. Otherwise, this
    class sets a `GradientHandle`. Between the backward passes of a step, handles raise an error when used, since
    their gradients are not complete.
    """

    def __init__(self, engine: MicroStepEngine, mesh: Mesh) -> None:
        self._engine = engine
        self._local: dict[Tensor, Tensor] | None = None
        self._handles: dict[nn.Parameter, GradientHandle] = {}
        self._shown: list[nn.Parameter] = []
        self._trained: dict[nn.Parameter, tuple[str, Groups]] = {}
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                at = placement_of(name, parameter)
                is_sharded = mesh.tp_size > 1 and at.boxes != (whole_box(at.shape),)
                groups = (*engine.gradient_groups, *((mesh.group("tp"),) if is_sharded else ()))
                self._trained[parameter] = name, groups
        self._uses_handles = engine.hides_gradients or mesh.tp_size > 1

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, which have gradients after the last backward pass of a step."""
        return list(self._trained)

    def show(self, is_complete: bool) -> None:
        """Set handles after a backward pass; `is_complete` after the last one of a step."""
        if is_complete and not self._uses_handles:
            return
        self._local = dict(self._engine.local_gradients()) if is_complete else None
        self._shown = [parameter for parameter in self._trained if self._is_visible(parameter, is_complete)]
        for parameter in self._shown:
            parameter.grad = self._handle(parameter)

    def _is_visible(self, parameter: nn.Parameter, is_complete: bool) -> bool:
        """Return True if the parameter gets a handle."""
        if is_complete:
            return self._local is not None and parameter in self._local
        return parameter.requires_grad and parameter.grad is None

    def _handle(self, parameter: nn.Parameter) -> GradientHandle:
        handle = self._handles.get(parameter)
        if handle is None or handle.shape != parameter.shape:  # stage 3 frees and gathers parameters
            name, groups = self._trained[parameter]
            handle = GradientHandle(parameter.detach(), name, partial(self._find, parameter), groups)
            self._handles[parameter] = handle
        return handle

    def _find(self, parameter: nn.Parameter) -> Tensor | None:
        return None if self._local is None else self._local[parameter]

    @contextmanager
    def lent(self, whole: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Set the gradients of whole parameters, by name, in this context; what the script removes is removed."""
        lent: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter, (name, groups) in self._trained.items():
            if name in whole and parameter.grad is not None:
                gradient, shown = parameter.grad, whole[name]
                shown.grad = GradientHandle(shown.detach(), name, partial(self._find, parameter), groups) if (
                    isinstance(gradient, GradientHandle)) else gradient
                lent.append((parameter, shown))
        yield
        for parameter, shown in lent:
            if shown.grad is None:
                parameter.grad = None

    def hide(self) -> list[nn.Parameter]:
        """Remove the handles, and return the parameters whose gradient the script has removed.

        Raises:
            UserError: the script has replaced a gradient.
        """
        removed = []
        for parameter in self._shown:
            handle, gradient = self._handles[parameter], parameter.grad
            parameter.grad = None
            if gradient is None:
                removed.append(parameter)
            elif gradient is not handle:
                raise UserError(f"the gradient of {self._trained[parameter][0]} was replaced by another tensor",
                                where="Wrapped.step", instead="a change in place, such as parameter.grad.mul_(0.5)")
            elif self._local is not None and not self._engine.hides_gradients:
                parameter.grad = self._local[parameter]
        self._shown, self._local = [], None
        return removed

    def clear(self, checks: bool = False) -> None:
        """Remove the handles.

        Raises:
            UserError: `checks`, and the script has removed some gradients between backward passes of a step.
        """
        for parameter in self._shown:
            if checks and parameter.grad is not self._handles[parameter]:
                raise UserError(f"the gradient of {self._trained[parameter][0]} was removed or replaced between "
                                "backward passes of a step", where="Wrapped.backward",
                                instead="model.zero_grad(), or a change between the last backward pass and step")
            parameter.grad = None
        self._shown, self._local = [], None


def zero_in_place(parameters: list[nn.Parameter]) -> None:
    """Set the visible gradients of parameters to zero."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
