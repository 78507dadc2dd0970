"""Parameters that a script adds to a wrapped module, which the layout and the optimizer would not know."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ezpz_llm.core.base import UserError
from ezpz_llm.training.library.callers import is_called_by_script

_KNOWN: weakref.WeakKeyDictionary[nn.Module, set[nn.Parameter]] = weakref.WeakKeyDictionary()
"""Parameters of the wrapped model that each module belongs to."""


def reject_new_parameters(model: nn.Module) -> None:
    """Raise a UserError when the script adds a parameter to a module of the model, also in a new submodule."""
    if not _KNOWN:
        register_module_parameter_registration_hook(_check_parameter)
        register_module_module_registration_hook(_check_module)
    parameters = set(model.parameters())
    for module in model.modules():
        _KNOWN[module] = parameters


def _check_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if module in _KNOWN and parameter is not None and is_called_by_script():
        _check(module, name, [parameter])


def _check_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if module in _KNOWN and submodule is not None and is_called_by_script():
        _check(module, name, submodule.parameters())


def _check(module: nn.Module, name: str, parameters: Iterable[nn.Parameter]) -> None:
    if any(parameter not in _KNOWN[module] for parameter in parameters):
        raise UserError(f"a new parameter in {name} of a wrapped model", where="model.module",
                        instead="the change before wrap, or for new values parameter.copy_(…) under "
                                "torch.no_grad() in model.gathered()")
