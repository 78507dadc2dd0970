"""Writes of a model's forward pass to its own parameters, which layouts that gather parameters would lose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.library.replicas import fingerprint

_CALLS = 2
"""Number of calls of each module that are checked."""


class ForwardWrites:
    """Check of the first calls of modules for writes to their parameters, such as a limit of their norm.

    Create it when the layout has registered its hooks, since parameters are gathered between these.
    """

    def __init__(self, module: nn.Module) -> None:
        self._changed: list[tuple[str, Tensor]] = []
        for name, part in module.named_modules():
            if any(True for _ in part.parameters(recurse=False)):
                _Watch(name, part, lambda name, changed: self._changed.append((name, changed)))

    def check(self) -> None:
        """Check the calls since the last check.

        Raises:
            UserError: one has written to a parameter.
        """
        changed, self._changed[:] = list(self._changed), []
        for name, has_changed in changed:
            if has_changed:
                raise UserError(f"the forward pass of {name or 'the model'} changes its parameters, which are "
                                "gathered only for the pass", where="a wrapped model",
                                instead="the change in model.gathered() after model.step(); ddp, zero1 or zero2")


class _Watch:
    """Hooks that compare the parameters of a module before and after its first calls."""

    def __init__(self, name: str, module: nn.Module, report: Callable[[str, Tensor], Any]) -> None:
        self._report, self._calls = partial(report, name), 0
        self._before: Tensor | None = None
        self._handles = [module.register_forward_pre_hook(self._start),
                         module.register_forward_hook(self._finish, prepend=True)]

    def _start(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before = _all_values(module)

    def _finish(self, module: nn.Module, *_: Any) -> None:
        if self._before is None:
            return
        self._report((self._before != _all_values(module)).any())
        self._before = None
        self._calls += 1
        if self._calls == _CALLS:
            for handle in self._handles:
                handle.remove()


def _all_values(module: nn.Module) -> Tensor:
    """Return a fingerprint of each own parameter of a module; 0 for one that is not gathered."""
    return torch.stack([torch.zeros((), dtype=torch.int64, device=parameter.device)
                        if isinstance(parameter, DTensor) else fingerprint(parameter)
                        for parameter in module.parameters(recurse=False)])
