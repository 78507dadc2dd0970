"""Types in the functions of ezpz_llm that have their own backward pass, and in hooks on gradients.

`_FUNCTIONS` declares the types of each function's inputs and result over the tensor-parallel ranks. The function's
real forward and backward passes run operation by operation, and must agree with the declaration. Gradients that
torch computes itself have the type that belongs to their tensor's type: the library rejects operations for which
they would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from type_rules import OperationRules, Types, axes_of, dual, fits, replaced, stamp

from ezpz_llm.training.dist.torch_internals import find
from ezpz_llm.training.model import blockwise_attention, embedding, gpt, loss, tp_collectives
from ezpz_llm.training.model.gpt import Block
from ezpz_llm.training.model.parameters import placement_of

_current_mode = find("spmd_types._state", "_current_mode")


@dataclass(frozen=True)
class Signature:
    """Types of a function over the tensor-parallel ranks, its `group`, with which it communicates.

    Over other axes, the result has the type that the forward pass computes.

    Attributes:
        inputs: types of the first arguments.
    """

    group: ProcessGroup | None
    inputs: tuple[Any, ...]
    output: Any


def _loss_signature(columns: Any, *inputs: Any) -> Signature | None:
    return Signature(columns.group, inputs, I) if columns.ranks > 1 else None


_FUNCTIONS: dict[Any, Callable[..., Signature | None]] = {
    tp_collectives._SumBackward: lambda x, group: Signature(group, (I,), R),
    tp_collectives._SumForward: lambda x, group: Signature(group, (P,), I),
    loss._TokenLosses: lambda logits, targets, z_loss, columns: _loss_signature(columns, V, I),
    loss._ChunkedLoss: lambda hidden, weight, targets, options: _loss_signature(options.columns, R, V, I),
    embedding._Lookup: lambda *inputs: None,
    blockwise_attention._BlockwiseAttention: lambda *inputs: None,
    gpt._Rotate: lambda *inputs: None,
}
"""Functions that map arguments to a signature; None for a function that does not communicate."""


@dataclass(frozen=True)
class _Call:
    """Types of a call, for its backward pass; `gradients` has None for arguments that are not tensors."""

    output: Types
    gradients: Sequence[Types | None]
    axes: list[spmd.MeshAxis]
    where: str


class RankProgram(OperationRules):
    """Mode that runs a rank's program with types, inside `checked`.

    Attributes:
        where: names of the running modules, innermost last; after an error, where it occurred.
    """

    def __init__(self, axes: Mapping[str, spmd.MeshAxis]) -> None:
        super().__init__(axes)
        self.where: list[str] = []
        self._hooked: dict[Any, Types] = {}
        self._in_backward = False
        self._context: Any = None

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check types in this context."""
        with ExitStack() as stack:
            for function in _FUNCTIONS:
                stack.enter_context(replaced(function, "forward", self._recorded_forward(function.forward)))
                stack.enter_context(replaced(function, "backward", self._checked_backward(function)))
            stack.enter_context(replaced(Block, "_layers", self._checked_recomputation(Block._layers)))
            stack.enter_context(spmd.set_current_mesh(dict(self.axes)))
            stack.enter_context(typecheck(strict_mode="strict"))
            stack.enter_context(self)
            yield

    def gradient_types(self, tensor: Tensor) -> Types:
        """Return the types of a tensor's gradient, after the hooks of the last backward pass."""
        return self._hooked.get(tensor) or dual(spmd.get_local_type(tensor))

    def track(self, module: nn.Module) -> None:
        """Keep `where` up to date while a module runs."""
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda _, inputs, name=name or "the model": self.where.append(name),
                                           prepend=True)
            part.register_forward_hook(lambda *_: self.where.__delitem__(-1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function: Any = getattr(func, "__self__", None)
        is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
        if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
            return func(args[0], self._typed_hook(func, *args))
        if not spmd.is_type_checking():
            return func(*args, **(kwargs or {}))
        if is_function:
            if function in _FUNCTIONS:
                with self:
                    return self._apply(function, func, args)
            if function.__module__ == "deepspeed.sequence.layer":
                return func(*args)  # checks the all-to-all in its forward pass
            return function.apply(*args)  # by the library, which rejects functions that it does not know
        if func is torch.Tensor.backward:
            return self._run_backward(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _run_backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        self._in_backward = True
        self._hooked.clear()
        for name in self.axes.keys() & {"dp", "across", "within"} if tensor.dim() == 0 else ():
            # A step's loss is the mean of the data-parallel ranks' losses, so each is a term of a sum.
            spmd.assert_type(tensor, {self.axes[name]: P})
        try:
            torch.Tensor.backward(tensor, *args, **kwargs)
        finally:
            self._in_backward = False

    def _apply(self, function: Any, apply: Any, args: tuple[Any, ...]) -> Tensor:
        """Run the forward pass of a function with types, and check them against its signature."""
        name, signature = function.__name__, _FUNCTIONS[function](*args)
        tensors = [value for value in args if isinstance(value, Tensor)]
        before = [dict(spmd.get_local_type(tensor)) for tensor in tensors]
        axes = [] if signature is None else axes_of(self.axes, signature.group)
        if axes not in ([], [self.axes.get("tp")]):
            raise SpmdTypeError(f"{name}: communicates over {' and '.join(map(str, axes))}, not over tp")
        inputs: tuple[Any, ...] = ()
        output, trained = {}, [types for tensor, types in zip(tensors, before, strict=True) if tensor.requires_grad]
        if signature is not None:
            inputs = signature.inputs
            for position, expected in enumerate(inputs):
                _require_input(f"{name}: argument {position}", args[position], axes[0], expected)
        with self._communicating(axes):
            result = apply(*args)
        if before != [spmd.get_local_type(tensor) for tensor in tensors]:
            raise SpmdTypeError(f"{name}: changes an input in place, which later operations use")
        for axis, computed in spmd.get_local_type(result).items():
            if axis in axes and signature is not None:
                output[axis] = signature.output
            else:  # in the forward pass of a function, I and R are the same
                output[axis] = I if computed is R and I in (types[axis] for types in trained) else computed
            if not fits(computed, output[axis]):
                raise SpmdTypeError(f"{name}: returns {computed} over {axis}, not {output[axis]}")
        gradients = [dual({**spmd.get_local_type(value), **dict.fromkeys(axes, declared)})
                     if isinstance(value, Tensor) else None
                     for value, declared in zip(args, (*inputs, *args[len(inputs):]), strict=True)]
        self._context.typed_call = _Call(output, gradients, axes, self.where[-1])
        with spmd.no_typecheck():
            result = result.view_as(result)
        return spmd.assert_type(result, output)

    def _recorded_forward(self, original: Any) -> Any:
        def forward(ctx: Any, *args: Any) -> Tensor:
            """Run the forward pass, and keep the types of the tensors that it saves."""
            result = original(ctx, *args)
            self._context = ctx
            ctx.saved_types = [None if saved is None else dict(spmd.get_local_type(saved))
                               for saved in ctx.to_save or ()]
            return result

        return staticmethod(forward)

    def _checked_backward(self, function: Any) -> Any:
        original, name = function.backward, f"backward of {function.__name__}"

        def backward(ctx: Any, gradient: Tensor) -> Any:
            """Run the backward pass with types, and compare its results with the signature."""
            call = ctx.typed_call
            self.where.append(call.where)
            gradient = stamp(gradient, dual(call.output))
            with self._resumed(), self._communicating(call.axes):
                results = original(_TypedContext(ctx), gradient)
            if spmd.get_local_type(gradient) != dual(call.output):
                raise SpmdTypeError(f"{name}: changes the gradient in place, which other functions may use")
            for position, (result, types) in enumerate(zip(results, call.gradients, strict=True)):
                for axis, expected in (types or {}).items() if result is not None else ():
                    found = spmd.get_local_type(result)[axis]
                    if not fits(found, expected):
                        raise SpmdTypeError(f"{name}: gradient {position} is {found} over {axis}, not {expected}")
            self.where.pop()
            return results

        return staticmethod(backward)

    def _checked_recomputation(self, original: Any) -> Any:
        def layers(block: Block, *inputs: Any) -> Tensor:
            """Compute the block, with types also during the backward pass."""
            if not self._in_backward:
                return original(block, *inputs)
            with self._resumed():
                return original(block, *inputs)

        return layers

    def _typed_hook(self, register: Any, parameter: Any, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the hook of a parameter, to be called with types."""
        def gradient_hook(gradient: Tensor) -> Any:
            """Call the hook with a typed gradient, and keep the type of its result."""
            self.where.append(placement_of("a tensor", parameter).name)
            with self._resumed():
                result = hook(stamp(gradient, self.gradient_types(parameter)))
            if result is not None:
                self._hooked[parameter] = dict(spmd.get_local_type(result))
            self.where.pop()
            return result

        def accumulated_hook(parameter: Any) -> None:
            """Call the hook with a parameter that has a typed gradient."""
            with self._resumed():
                parameter.grad = stamp(parameter.grad, self.gradient_types(parameter))
                hook(parameter)

        return gradient_hook if register is torch.Tensor.register_hook else accumulated_hook

    @contextmanager
    def _communicating(self, axes: list[spmd.MeshAxis]) -> Iterator[None]:
        self.communicates, before = axes, self.communicates
        yield
        self.communicates = before

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        """Check types in Python code that torch calls during a backward pass, for which it suspends modes."""
        with _current_mode(), self:
            yield


class _TypedContext:
    """Context of a backward pass whose saved tensors have the types that they had; torch may save copies."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.saved_tensors = [saved if types is None else stamp(saved, types)
                              for saved, types in zip(context.saved_tensors, context.saved_types, strict=True)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _require_input(what: str, tensor: Tensor, axis: Any, expected: Any) -> None:
    """Check the type of an input of a function; without a gradient, R and I are the same."""
    found = spmd.get_local_type(tensor)[axis]
    is_free = {found, expected} == {R, I} and not tensor.requires_grad
    if found is not expected and not is_free and (found, expected) != (V, P):
        raise SpmdTypeError(f"{what} is {found} over {axis}, not {expected}")
