"""Parameters of which a rank has a shard, or nothing, between passes: operations on their values raise an error.

torch and DeepSpeed would compute on the shard. A norm would be wrong, and what ZeRO-3 has not gathered would ignore
what a script writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.deepspeed_internals import is_gathered, is_partitioned
from ezpz_llm.training.dist.torch_internals import TENSOR_METADATA, plain_functions
from ezpz_llm.training.library.callers import is_called_by_script
from ezpz_llm.training.model.parameters import placement_of, whole_box

_SIZES = {"shape", "size", "numel", "dim", "ndim", "__len__", "stride", "nbytes"}
"""Attributes and methods that return those of the whole parameter."""
_WITHOUT_VALUES = {
    "dtype", "device", "layout", "grad", "requires_grad", "requires_grad_", "is_leaf", "grad_fn",
    "is_floating_point", "is_complex", "is_cuda", "is_sparse", "is_meta", "type", "element_size", "itemsize",
    "register_hook", "register_post_accumulate_grad_hook", "__repr__", "__hash__", "__format__", "is_contiguous",
    "output_nr", "name", "names", "get_device", "is_cpu", "is_nested", "is_quantized", *TENSOR_METADATA}
"""Attributes and methods that do not read or write values."""


def guard(module: nn.Module, layout: str) -> None:
    """Make operations of a script on the values of sharded parameters raise a UserError."""
    for name, parameter in module.named_parameters():
        placement = placement_of(name, parameter)
        is_divided = placement.boxes != (whole_box(placement.shape),)
        if isinstance(parameter, DTensor):
            parameter.__class__ = _ShardOfTorch
        elif is_partitioned(parameter):
            parameter.__class__ = _ShardOfDeepSpeed
        elif is_divided:
            parameter.__class__ = _ShardOfLayer
        parameter.ezpz_shard = f"the parameter {name}, which the layout {layout} shards over ranks"
        parameter.ezpz_shape = torch.Size(placement.shape)
        parameter.ezpz_is_divided = is_divided


@contextmanager
def unguarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make shards of layers plain parameters in this context, for an optimizer's faster steps."""
    shards = [parameter for parameter in parameters if isinstance(parameter, _ShardOfLayer)]
    for parameter in shards:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:
        for parameter in shards:
            parameter.__class__ = _ShardOfLayer


def _function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name = _name_of(func)
    if name not in _WITHOUT_VALUES and is_called_by_script():
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for parameter in value if isinstance(value, list | tuple) else (value,):
                if isinstance(parameter, _SHARDS) and parameter.is_partial():
                    if name in _SIZES:
                        return func(torch.empty(parameter.ezpz_shape, device="meta", dtype=parameter.dtype),
                                    *args[1:], **kwargs)
                    raise UserError(f"{name} of {parameter.ezpz_shard}", where="the training loop",
                                    instead="with model.gathered(): … on every rank, with the parameters of "
                                            "model.module")
    with plain_functions():
        return func(*args, **(kwargs or {}))


class _ShardOfTorch(DTensor):
    """Sharded parameter of fully_shard."""

    __torch_function__ = classmethod(_function)

    def is_partial(self) -> bool:
        """Return True: also the shard of a single rank is not a plain tensor."""
        return True


class _ShardOfDeepSpeed(nn.Parameter):
    """Parameter that ZeRO-3 partitions, and gathers for passes."""

    __torch_function__ = classmethod(_function)

    def is_partial(self) -> bool:
        """Return True if the parameter is not gathered, or only over the ranks with the same part of a layer."""
        return self.ezpz_is_divided or not is_gathered(self)


class _ShardOfLayer(nn.Parameter):
    """Part of a layer's parameter that a rank has under tensor parallelism."""

    __torch_function__ = classmethod(_function)

    def is_partial(self) -> bool:
        """Return True: a rank never has the other parts."""
        return True


_SHARDS = (_ShardOfTorch, _ShardOfDeepSpeed, _ShardOfLayer)


def _name_of(function: Any) -> str:
    """Return the name of a method or attribute of tensors, given the function that torch calls for it."""
    if function.__name__ in ("__get__", "__set__", "__delete__"):
        attribute = function.__self__
        return str(getattr(attribute, "fget", attribute).__name__)
    return "torch.autograd.grad" if function is torch.autograd.grad else str(function.__name__)
