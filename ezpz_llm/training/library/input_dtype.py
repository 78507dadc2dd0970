"""Casts of the inputs of a wrapped model and its layers to its precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors in the arguments of a module's calls to `dtype` from now on.

    So are those of its layers, since a script may call a layer itself, or compute its inputs in fp32.
    """
    if dtype == torch.float32:
        return
    module.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)
    for layer in module.modules():
        if layer is not module and any(True for _ in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)


@contextmanager
def explained_dtypes(dtype: torch.dtype) -> Iterator[None]:
    """Turn torch's errors for operations on two dtypes in this context into a UserError, unless in fp32."""
    try:
        yield
    except RuntimeError as error:
        if dtype == torch.float32 or "dtype" not in str(error):
            raise
        raise UserError(f"an operation on {str(dtype).removeprefix('torch.')} and another dtype: {error}",
                        where="the model's forward pass",
                        instead="tensor.to(weight.dtype) in the module, also of buffers, which stay in fp32; or a "
                                "ds_config in fp32") from error


def _cast_arguments(dtype: torch.dtype, module: nn.Module, inputs: Any, keywords: Any) -> Any:
    if not keywords and len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].dtype == dtype:
        return None
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
