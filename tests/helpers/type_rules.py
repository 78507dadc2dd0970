"""Types of tensors by mesh axis, checked for each operation of a rank's program.

The types are those of the library spmd_types. R: equal on all ranks, with a gradient that is a term of a sum. I:
equal, and so is the gradient. V: different on each rank. P: a term of a sum over the ranks. The library infers the
types of torch's operations, and rejects an operation whose result or gradient would be wrong. This module adds
operations for which the library has no rule, and reductions along several axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.overrides import TorchFunctionMode

from ezpz_llm.training.dist.torch_internals import (
    foreach_copy_,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    viewed_tensor,
)

Types = Mapping[Any, Any]
"""Type of a tensor by mesh axis."""

_CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.type_as)
_UNINITIALIZED = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class OperationRules(TorchFunctionMode):
    """Mode that adds the types of operations that the library does not know. Use it inside the library's mode.

    Attributes:
        axes: mesh axes by name.
        communicates: axes along which the running function may communicate.
        normed: tensors whose norm was taken, in order.
        on_slice: called with a tensor and a part of it, to change the types of the part.
    """

    def __init__(self, axes: Mapping[str, spmd.MeshAxis]) -> None:
        super().__init__()
        self.axes = dict(axes)
        self.communicates = list(axes.values())
        self.normed: list[Tensor] = []
        self.on_slice: Callable[[Tensor, Tensor], None] = lambda whole, part: None
        self._rules: dict[Any, Callable[..., Any]] = {
            torch.distributed.all_reduce: self._all_reduce, torch.distributed.all_gather: self._all_gather,
            foreach_norm: self._norms, foreach_div_: self._divide, foreach_mul_: _scale,
            foreach_copy_: _rule_of_writes(foreach_copy_),
            torch.Tensor.__getitem__: self._slice, torch.Tensor.__setitem__: _assign, torch.Tensor.copy_: _copy,
            torch.sparse_coo_tensor: _make_sparse, torch.addcmul: _addcmul,
            **{cast: _rule_of_casts(cast) for cast in _CASTS},
            **{make: self._rule_of_memory(make) for make in _UNINITIALIZED}}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not spmd.is_type_checking():
            return func(*args, **kwargs)
        if func in self._rules:
            return self._rules[func](*args, **kwargs)
        if getattr(func, "__name__", "") == "__set__":  # an attribute, such as grad
            return unchecked(func, *args)
        if func is torch.Tensor.add_:
            _read_bucket(args[0])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and args and result is args[0]:
            _overwrite(result, dict(spmd.get_local_type(result)))
        return result

    def types(self, **types: Any) -> dict[Any, Any]:
        """Return types by axis, given types by the axes' names; the other axes have type R."""
        return {axis: types.get(name, R) for name, axis in self.axes.items()}

    def require(self, what: str, tensor: Tensor, **types: Any) -> None:
        """Check a tensor's types, given as in `types`; R and I are equal here.

        Raises:
            SpmdTypeError: a type differs.
        """
        for axis, expected in self.types(**types).items():
            found = spmd.get_local_type(tensor)[axis]
            if found is not expected and {found, expected} != {R, I}:
                raise SpmdTypeError(f"{what} is {found} over {axis}, not {expected}")

    def _axes_of(self, group: ProcessGroup | None) -> list[spmd.MeshAxis]:
        axes = axes_of(self.axes, group)
        if not set(axes) <= set(self.communicates):
            raise SpmdTypeError(f"communicates over {' and '.join(map(str, axes))}, not over "
                                f"{' and '.join(map(str, self.communicates)) or 'any axis'}")
        return axes

    def _all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None,
                    async_op: bool = False) -> Any:
        for axis in self._axes_of(group):
            if spmd.get_local_type(tensor)[axis] not in (V, P):
                raise SpmdTypeError(f"all_reduce: sums a tensor that is equal on all ranks of {axis}")
            _overwrite(tensor, {axis: R})
        return unchecked(torch.distributed.all_reduce, tensor, op=op, group=group, async_op=async_op)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None,
                    async_op: bool = False) -> Any:
        types = dict(spmd.get_local_type(tensor))
        for axis in self._axes_of(group):
            if types[axis] is not V:
                raise SpmdTypeError(f"all_gather: gathers a tensor that is {types[axis]} over {axis}, not V")
            types[axis] = R
        for output in outputs:
            _overwrite(output, types)
        return unchecked(torch.distributed.all_gather, outputs, tensor, group=group, async_op=async_op)

    def _norms(self, tensors: list[Tensor]) -> list[Tensor]:
        self.normed += tensors
        norms = list(unchecked(foreach_norm, tensors))
        for norm, tensor in zip(norms, tensors, strict=True):
            _read_bucket(tensor)
            if P in spmd.get_local_type(tensor).values():
                raise SpmdTypeError("norm: the gradient is not reduced")
            spmd.assert_type(norm, dict(spmd.get_local_type(tensor)))
        return norms

    def _divide(self, tensors: list[Tensor], divisor: Tensor) -> None:
        self.require("the divisor of the gradients", divisor)
        unchecked(foreach_div_, tensors, divisor)

    def _slice(self, tensor: Tensor, key: Any) -> Any:
        part = torch.Tensor.__getitem__(tensor, key)
        self.on_slice(tensor, part)
        return part

    def _rule_of_memory(self, make: Any) -> Callable[..., Tensor]:
        # Memory that nothing has written yet can become a tensor of any type.
        return lambda *args, **kwargs: spmd.assert_type(unchecked(make, *args, **kwargs), self.types())


def _scale(tensors: list[Tensor], factor: float) -> None:
    # The product with a number has the type of the tensor.
    unchecked(foreach_mul_, tensors, factor)


def dual(types: Types) -> dict[Any, Any]:
    """Return the types of the gradient of a tensor with these types."""
    return {axis: kind.backward_type() for axis, kind in types.items()}


def fits(found: Any, expected: Any) -> bool:
    """Return True if a value can have the expected type; R and I differ only in their gradients."""
    return found is expected or {found, expected} == {R, I} or (found is V and expected is P)


def axes_of(axes: Mapping[str, spmd.MeshAxis], group: ProcessGroup | None) -> list[spmd.MeshAxis]:
    """Return the mesh axes along which a group's ranks differ.

    Raises:
        SpmdTypeError: the group does not consist of whole axes.
    """
    whole = spmd.MeshAxis.of(torch.distributed.group.WORLD if group is None else group)
    inside = [whole] if whole in axes.values() else [axis for axis in axes.values() if axis <= whole]
    if math.prod(axis.size() for axis in inside) != whole.size():
        raise SpmdTypeError(f"the {whole.size()} ranks of the group are not those of axes of the mesh "
                            f"({', '.join(axes)})")
    return inside


def stamp(tensor: Tensor, types: Types) -> Tensor:
    """Return the same values with these types."""
    return spmd.assert_type(unchecked(tensor.detach), dict(types))


def unchecked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose operations are not checked."""
    with spmd.no_typecheck():
        return func(*args, **kwargs)


def _rule_of_casts(cast: Any) -> Callable[..., Tensor]:
    def rule(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A cast is linear up to rounding, so that a term of a sum stays one.
        result = unchecked(cast, tensor, *args, **kwargs)
        return result if result is tensor else spmd.assert_type(result, dict(spmd.get_local_type(tensor)))

    return rule


def _rule_of_writes(write: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: unchecked(write, *args, **kwargs)


def _make_sparse(index: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result = unchecked(torch.sparse_coo_tensor, index, values, *args, **kwargs)
    return spmd.assert_type(result, dict(spmd.get_local_type(values)))


def _copy(tensor: Tensor, source: Tensor, *args: Any) -> Tensor:
    _overwrite(tensor, spmd.get_local_type(source))
    return unchecked(torch.Tensor.copy_, tensor, source, *args)


def _addcmul(tensor: Tensor, first: Tensor, second: Tensor, *, value: float = 1, out: Tensor) -> Tensor:
    return _copy(out, tensor + first * second * value)  # by the library, which does not know that addcmul is linear


def _assign(tensor: Tensor, key: Any, value: Any) -> None:
    """Assign a part of a tensor, which then has the types that it and the value have together."""
    kinds = spmd.get_local_type(value) if isinstance(value, Tensor) else {}
    for axis, kind in kinds.items():
        found = spmd.get_local_type(tensor)[axis]
        if P in (kind, found) and not fits(kind, found):
            raise SpmdTypeError(f"assignment: {kind} to a tensor that is {found} over {axis}")
    _overwrite(tensor, {axis: V for axis, kind in kinds.items() if kind is V})
    unchecked(torch.Tensor.__setitem__, tensor, key, value)


def _overwrite(tensor: Tensor, types: Types) -> None:
    """Give a tensor that is overwritten these types, and the tensor of which it is a view."""
    for written in (tensor, viewed_tensor(tensor)):
        for axis, kind in types.items() if written is not None and spmd.has_local_type(written) else ():
            spmd.mutate_type(written, axis, src=spmd.get_local_type(written)[axis], dst=kind)


def _read_bucket(tensor: Tensor) -> None:
    """Update the types of a gradient that is a view of a bucket, if the bucket was reduced."""
    bucket = viewed_tensor(tensor)
    for axis, kind in spmd.get_local_type(bucket).items() if bucket is not None else ():
        if kind is R and spmd.get_local_type(tensor)[axis] is P:
            spmd.mutate_type(tensor, axis, src=P, dst=R)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class in this context."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
