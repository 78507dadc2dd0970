"""Parameters that a script adds to a wrapped module, which the layout and the optimizer would not know."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ezpz_llm.base import UserError


class KnownParameters:
    """Parameters of a wrapped module. A new one, also in a new submodule, raises a UserError."""

    def __init__(self, module: nn.Module) -> None:
        """Check from now on."""
        self._parameters = set(module.parameters())
        self._is_open = False
        if not _OWNERS:
            register_module_parameter_registration_hook(_check_parameter)
            register_module_module_registration_hook(_check_module)
        for part in module.modules():
            _OWNERS[part] = self

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow other parameters in this context, for the layout."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def check(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Check that parameters of a new attribute are known.

        Raises:
            UserError: one is new.
        """
        if not self._is_open and any(parameter not in self._parameters for parameter in parameters):
            raise UserError(f"a new parameter in {name} of a wrapped model", where="model.module",
                            instead="the change before wrap, or for new values parameter.copy_(…) under "
                                    "torch.no_grad() in model.gathered()")


_OWNERS: weakref.WeakKeyDictionary[nn.Module, KnownParameters] = weakref.WeakKeyDictionary()
"""Known parameters of the wrapped model that each module belongs to."""


def _check_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if (known := _OWNERS.get(module)) is not None and parameter is not None:
        known.check(name, [parameter])


def _check_module(module: nn.Module, name: str, submodule: nn.Module) -> None:
    if (known := _OWNERS.get(module)) is not None and submodule is not None:
        known.check(name, submodule.parameters())
