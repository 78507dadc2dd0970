"""Groups of a wrapped model's optimizer: the model's parameters for the script, the layout's tensors in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import step_hooks

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
        self._own_hooks: set[int] = set()
        self._script_hooks = _ids_of_hooks(optimizer)
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
        self._own_hooks = _ids_of_hooks(self._optimizer) - self._script_hooks
        self._shown = groups
        stepped = [list(group["params"]) for group in self._optimizer.param_groups]
        if _ids(stepped) == _ids(groups):
            return
        self._optimizer.ezpz_stepped = stepped
        self._set(groups)
        self._keep_parts(part)
        self._optimizer.state = _State(dict, self._optimizer.state)

    def _set(self, groups: list[list[Any]]) -> None:
        for group, tensors in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = tensors

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow a step in this context, of the layout's tensors."""
        before, after = (self._taken(hooks) for hooks in step_hooks(self._optimizer))
        self._is_stepping = True
        try:
            # Hooks of the script use the model's parameters, and may write to them.
            _call(before, self._optimizer)
            with self._with_stepped():
                yield
            _call(after, self._optimizer)
        finally:
            self._is_stepping = False
            for hooks, taken in zip(step_hooks(self._optimizer), (before, after), strict=True):
                hooks.update(taken)

    def _taken(self, hooks: dict[int, Any]) -> dict[int, Any]:
        """Remove the hooks of the script from the hooks of the optimizer, and return them."""
        return {key: hooks.pop(key) for key in list(hooks) if key not in self._own_hooks}

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
            """Return the state of this rank's part, with what distinguishes it."""
            with self._with_stepped():
                return {**save(), _PART: part}

        @wraps(load)
        def load_state_dict(state_dict: dict[str, Any]) -> None:
            """Load the state of this rank's part.

            Raises:
                UserError: it is of another part.
            """
            if state_dict.get(_PART) != part:
                raise UserError("the state dict of an optimizer of another layout or rank",
                                where="optimizer.load_state_dict",
                                instead="ezpz_llm.save_checkpoint(model, step) and ezpz_llm.load_checkpoint(model)")
            with self._with_stepped():
                load({key: value for key, value in state_dict.items() if key != _PART})
            optimizer.state = _State(dict, optimizer.state)

        _set_method(optimizer, state_dict)
        _set_method(optimizer, load_state_dict)


class _State(defaultdict[Any, Any]):
    """State of an optimizer by the tensor that it steps, which is not the model's parameter."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, nn.Parameter):
            raise UserError("optimizer.state of a parameter, whose state the layout has by other tensors",
                            where="a wrapped model", instead="optimizer.state.values()")
        return super().__missing__(key)


def _ids_of_hooks(optimizer: torch.optim.Optimizer) -> set[int]:
    return {key for hooks in step_hooks(optimizer) for key in hooks}


def _call(hooks: dict[int, Any], optimizer: torch.optim.Optimizer) -> None:
    for hook in hooks.values():
        hook(optimizer, (), {})


def _ids(groups: list[list[Any]]) -> list[list[int]]:
    return [[id(tensor) for tensor in group] for group in groups]


def _set_method(owner: Any, function: Callable[..., Any]) -> None:
    setattr(owner, function.__name__, function)
