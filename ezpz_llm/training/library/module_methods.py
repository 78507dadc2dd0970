"""Methods of a wrapped module and its optimizer that would be wrong, or without effect, under the layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from ezpz_llm.core.base import UserError


class WholeState:
    """Record of the contexts in which the parameters of a model are whole.

    Attributes:
        part: the module whose parameters are whole; None for all.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.part: nn.Module | None = None

    @contextmanager
    def open(self, part: nn.Module | None) -> Iterator[None]:
        """Parameters are whole in this context."""
        self.is_open, self.part = True, part
        try:
            yield
        finally:
            self.is_open = False


class _Model(Protocol):
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def _clear_gradients(self, set_to_none: bool = True) -> None: ...


_MODELS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Model]] = weakref.WeakKeyDictionary()
"""Wrapped models by module. A copy of a module is not in it."""


def check_not_wrapped(model: object) -> None:
    """Check that a model is a module that has no part under a layout.

    Raises:
        UserError: it is not.
    """
    if not isinstance(model, nn.Module):
        is_wrapped = hasattr(model, "module")
        raise UserError("a wrapped model" if is_wrapped else f"a {type(model).__name__}", where="ezpz_llm.wrap",
                        instead="a torch.nn.Module that is not wrapped")
    for name, module in model.named_modules():
        if module in _MODELS:
            raise UserError(f"{name or 'the model'} was wrapped before", where="ezpz_llm.wrap",
                            instead="wrap only once per module; for another optimizer or layout, create the module "
                                    "again and load_state_dict(model.state_dict())")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or (
                type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel"))):
            raise UserError(f"{name or 'the model'} is a {type(module).__name__}", where="ezpz_llm.wrap",
                            instead="the plain module, since wrap averages gradients over ranks")


def guard_methods(model: _Model, layout: str, whole: WholeState, is_sharded: bool) -> None:
    """Make methods of the module and the optimizer have the effect of plain torch, or raise a UserError.

    Args:
        is_sharded: True if this rank has shards of parameters.
    """
    module = model.module
    _MODELS[module] = weakref.ref(model)
    owner = weakref.ref(model)

    def zero_grad(set_to_none: bool = True) -> None:
        """Discard gradients, as `zero_grad` of optimizers does."""
        if (found := owner()) is not None:
            found._clear_gradients(set_to_none)

    model.optimizer.zero_grad = zero_grad
    module.zero_grad = MethodType(_zero_grad, module)  # a method, whose copy belongs to the copy of the module
    if not is_sharded:
        return

    def check_reading(*_: Any) -> None:
        """Raise an error for a state dict of shards."""
        if not whole.is_open:
            raise UserError(f"the state_dict of a module whose parameters are sharded by the layout {layout}",
                            where="model.module",
                            instead="model.state_dict() on every rank, or with model.gathered(): … on every rank, "
                                    "for example around save_pretrained")

    def check_writing(*_: Any) -> None:
        """Raise an error for a whole state dict, which shards cannot load."""
        if not whole.is_open:
            raise UserError(f"load_state_dict of a module whose parameters are sharded by the layout {layout}",
                            where="model.module", instead="model.load_state_dict(…) on every rank")

    def reject_copy(memo: Any) -> Any:
        """Raise an error for a copy, which would belong to the layout in part."""
        raise UserError(f"a copy of a module whose parameters are sharded by the layout {layout}",
                        where="model.module", instead="a new module, and copy.load_state_dict(model.state_dict())")

    module.register_state_dict_pre_hook(check_reading)
    module.register_load_state_dict_pre_hook(check_writing)
    module.__deepcopy__ = reject_copy


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """Discard gradients, as `torch.nn.Module.zero_grad` does."""
    owner = _MODELS.get(module)
    if owner is None:
        type(module).zero_grad(module, set_to_none)
    elif (found := owner()) is not None:
        found._clear_gradients(set_to_none)
