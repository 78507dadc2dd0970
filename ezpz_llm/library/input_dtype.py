"""Casts of a wrapped model's inputs to its precision."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors in the arguments of a module's calls to `dtype` from now on."""
    if dtype != torch.float32:
        module.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)


def _cast_arguments(dtype: torch.dtype, module: nn.Module, inputs: Any, keywords: Any) -> Any:
    return _cast(inputs, dtype), _cast(keywords, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nested value to `dtype`."""
    return on_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def on_tensors(value: Any, action: Callable[[Tensor], Tensor]) -> Any:
    """Apply `action` to each tensor in a value, including those in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return action(value)
    if isinstance(value, MutableMapping):
        mapped = copy(value)  # keep the type, such as a tokenizer's BatchEncoding
        mapped.update({name: on_tensors(member, action) for name, member in value.items()})
        return mapped
    if isinstance(value, list | tuple):
        members = [on_tensors(member, action) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value
