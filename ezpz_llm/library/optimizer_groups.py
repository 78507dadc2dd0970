"""Groups of a wrapped model's optimizer: the model's parameters for the script, the layout's tensors in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ezpz_llm.base import UserError

_PART = "ezpz_part"
"""Key in an optimizer's state dict: the part of the state that it has."""


class OptimizerGroups:
    """Access of a script and of steps to an optimizer.

    A layout steps master weights, rows, or slices of partitions. What a script would write to these would be lost
    in the next step, so its groups have the model's parameters, except during a step. Steps by the script raise a
    UserError.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject steps from now on. Create it before other hooks of the optimizer."""
        self._optimizer = optimizer
        self._is_stepping = False
        self._shown = [list(group["params"]) for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(self._check_step)

    def _check_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise UserError("optimizer.step() of a wrapped model's optimizer", where="the training loop",
                            instead="model.step(), which averages gradients and steps the optimizer")

    def show(self, groups: list[list[nn.Parameter]], part: list[Any]) -> None:
        """Show these parameters to the script, in each group, instead of the tensors that the layout steps.

        Args:
            part: what distinguishes this rank's part of the optimizer's state, such as the rank.
        """
        self._shown = groups
        stepped = [list(group["params"]) for group in self._optimizer.param_groups]
        if _ids(stepped) == _ids(groups):
            return
        self._optimizer.ezpz_stepped = stepped
        self._set(groups)
        self._keep_parts(part)

    def _set(self, groups: list[list[Any]]) -> None:
        for group, tensors in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = tensors

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow a step in this context, of the layout's tensors."""
        self._is_stepping = True
        try:
            with self._with_stepped():
                yield
        finally:
            self._is_stepping = False

    @contextmanager
    def _with_stepped(self) -> Iterator[None]:
        stepped = getattr(self._optimizer, "ezpz_stepped", None)
        if stepped is None:
            yield
            return
        self._set(stepped)
        try:
            yield
        finally:
            self._set(self._shown)

    def check(self) -> None:
        """Check that the script has not changed the parameters of the groups.

        Raises:
            UserError: it has.
        """
        if _ids([group["params"] for group in self._optimizer.param_groups]) != _ids(self._shown):
            raise UserError("the parameters of the optimizer's groups were changed after wrap",
                            where="Wrapped.step",
                            instead="all groups before wrap, with lr 0 until they are trained")

    def _keep_parts(self, part: list[Any]) -> None:
        """Make `state_dict` return this rank's part of the state, and `load_state_dict` accept only that part."""
        optimizer = self._optimizer
        save, load = optimizer.state_dict, optimizer.load_state_dict

        @wraps(save)
        def state_dict() -> dict[str, Any]:
            with self._with_stepped():
                return {**save(), _PART: part}

        @wraps(load)
        def load_state_dict(state_dict: dict[str, Any]) -> None:
            if state_dict.get(_PART) != part:
                raise UserError("the state dict of an optimizer of another layout or rank",
                                where="optimizer.load_state_dict",
                                instead="ezpz_llm.save_checkpoint(model, step) and ezpz_llm.load_checkpoint(model)")
            with self._with_stepped():
                load({key: value for key, value in state_dict.items() if key != _PART})

        _set_method(optimizer, state_dict)
        _set_method(optimizer, load_state_dict)


def _ids(groups: list[list[Any]]) -> list[list[int]]:
    return [[id(tensor) for tensor in group] for group in groups]


def _set_method(owner: Any, function: Callable[..., Any]) -> None:
    setattr(owner, function.__name__, function)
