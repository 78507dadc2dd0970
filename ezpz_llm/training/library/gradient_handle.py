"""Gradients that a rank holds only in part, as `grad` of a parameter.

A script may read norms and sums of them, scale and clamp them, for example with torch's `clip_grad_norm_`. Anything
that needs all elements on one rank raises a UserError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import make_wrapper, operator_schema, tree_leaves, tree_map

Groups = tuple[ProcessGroup | None, ...]
"""Groups over which a gradient is divided; None is the world."""
_WHERE = "gradients of a wrapped model"
_INSTEAD = ("wrap(clip=…), model.clip_grad_norm_(…), or operations on each element with a number, such as "
            "parameter.grad.mul_(0.5); or ddp in fp32, which has whole gradients")


class GradientHandle(Tensor):
    """Gradient in the shape of its parameter, without storage.

    Attributes:
        parameter_name: name of the parameter.
        find: function that returns this rank's elements in fp32, or None before the last backward pass of a step.
        groups: groups over which the elements are divided.
    """

    parameter_name: str
    find: Callable[[], Tensor | None]
    groups: Groups

    @staticmethod
    def __new__(cls, like: Tensor, name: str, find: Callable[[], Tensor | None], groups: Groups) -> GradientHandle:
        """Create the handle of a gradient with the size, dtype and device of `like`."""
        return make_wrapper(cls, like)

    def __init__(self, like: Tensor, name: str, find: Callable[[], Tensor | None], groups: Groups) -> None:
        self.parameter_name, self.find, self.groups = name, find, groups

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GradientHandle({self.parameter_name})"

    @property
    def elements(self) -> Tensor:
        """This rank's elements.

        Raises:
            UserError: more backward passes follow in the step.
        """
        if (elements := self.find()) is None:
            raise UserError(f"the gradient of {self.parameter_name} is complete only after the last backward pass "
                            "of a step", where=_WHERE, instead="this operation once per step, between the last "
                                                            "model.backward(loss) and model.step()")
        return elements

    def numpy(self, *, force: bool = False) -> Any:
        """Raise a UserError: the elements are on several ranks."""
        raise _unsupported(self, "numpy of")

    def tolist(self) -> Any:
        """Raise a UserError: the elements are on several ranks."""
        raise _unsupported(self, "tolist of")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GradientHandle))
        name = operator_schema(func).name.removeprefix("aten::")
        if name.startswith("_foreach"):
            return _foreach(func, name, args, kwargs)
        if name in ("detach", "alias"):
            return first
        if name in ("linalg_vector_norm", "norm"):
            return _norm(first, *args[1:], **kwargs)
        if name in _REDUCTIONS and len(args) == 1:
            return _reduce(first, name)
        if torch.Tag.pointwise in func.tags or name in _ALSO_ELEMENTWISE:
            return _elementwise(func, name, first, args, kwargs)
        raise _unsupported(first, f"{name} of")


def _unsupported(handle: GradientHandle, operation: str) -> UserError:
    instead = "no GradScaler, which fp32 and bf16 do not need" if operation.startswith("_amp") else _INSTEAD
    return UserError(f"{operation} the gradient of {handle.parameter_name}, which is divided over ranks or not in "
                     "the parameter's dtype", where=_WHERE, instead=instead)


def _elementwise(func: Any, name: str, first: GradientHandle, args: Any, kwargs: Any) -> Any:
    """Apply an operation to this rank's elements."""
    if operator_schema(func).is_mutable and not isinstance(args[0], GradientHandle):
        raise _unsupported(first, f"{name} of a tensor with")  # it would change a copy of the tensor

    def to_elements(value: Any) -> Any:
        """Replace a handle of the same gradient by its elements."""
        if isinstance(value, GradientHandle):
            if value.parameter_name != first.parameter_name:
                raise _unsupported(first, f"{name} of another gradient with")
            return value.elements
        if isinstance(value, Tensor) and value.dim():
            if first.groups or value.shape != first.shape:
                raise _unsupported(first, f"{name} of a tensor and")
            return value.to(first.elements.dtype).view_as(first.elements)
        return value

    result = func(*tree_map(to_elements, args), **tree_map(to_elements, kwargs))
    if operator_schema(func).is_mutable:
        return first
    return GradientHandle(first, first.parameter_name, lambda: result, first.groups)


def _foreach(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Apply an operation on lists of tensors to one gradient after another."""
    single = getattr(torch.ops.aten, {"_foreach_norm": "linalg_vector_norm"}.get(
        name, name.removeprefix("_foreach_")), None)
    if single is None:
        raise _unsupported(args[0][0], f"{name} of")
    results = []
    for number, handle in enumerate(args[0]):
        others = [other[number] if isinstance(other, list | tuple) else other for other in args[1:]]
        results.append(single(handle, *others, **kwargs))
    return None if name.endswith("_") else results


def _norm(handle: GradientHandle, order: Any = 2, dim: Any = None, keepdim: bool = False, **dtype: Any) -> Tensor:
    """Return the norm of the whole gradient. Collective over the groups."""
    order = 2 if order is None else order
    if dim not in (None, []) or keepdim:
        raise _unsupported(handle, "a norm along a dimension of")
    elements = handle.elements.float()
    if math.isinf(order):
        # This rank may have no elements.
        elements = torch.cat([elements.flatten(), elements.new_tensor([0.0 if order > 0 else math.inf])])
    norm = torch.linalg.vector_norm(elements, order)
    if math.isinf(order):
        return _all_reduced(norm, handle.groups, torch_dist.ReduceOp.MAX if order > 0 else torch_dist.ReduceOp.MIN)
    if not handle.groups:
        return norm
    return _all_reduced(norm ** order, handle.groups, torch_dist.ReduceOp.SUM) ** (1 / order)


_ALSO_ELEMENTWISE = ("zero_", "fill_", "copy_", "_to_copy")
"""Operations that torch does not mark as pointwise."""
_REDUCTIONS = ("sum", "mean", "max", "min", "any", "all")


def _reduce(handle: GradientHandle, name: str) -> Tensor:
    """Return a value of the whole gradient. Collective over the groups."""
    elements, operations = handle.elements, torch_dist.ReduceOp
    if name in ("any", "all"):
        value = getattr(elements, name)().to(torch.uint8)
        return _all_reduced(value, handle.groups, operations.MAX if name == "any" else operations.MIN).bool()
    if name in ("max", "min"):
        empty = torch.full((), -math.inf if name == "max" else math.inf, device=elements.device)
        value = getattr(elements, name)().float() if elements.numel() else empty
        return _all_reduced(value, handle.groups, operations.MAX if name == "max" else operations.MIN)
    sums = torch.stack([elements.float().sum(), torch.tensor(float(elements.numel()), device=elements.device)])
    total, count = _all_reduced(sums, handle.groups, operations.SUM)
    return total if name == "sum" else total / count


def _all_reduced(value: Tensor, groups: Groups, operation: Any) -> Tensor:
    for group in groups:
        torch_dist.all_reduce(value, operation, group=group)
    return value
