"""Counts of kernels, bytes and FLOPs of an optimizer step of the trainer's program, without a device.

The program is the engine of `ezpz_llm.training.trainer.run.make_engine`: model, loss, gradient norm, clipping and
optimizer, with its real shapes, on torch's fake tensors, which have shapes but no storage. The tensors are on the
CPU, since a build of torch without CUDA cannot run a backward pass on fake CUDA tensors. Three things are therefore
forced: the model's code takes the branches of a GPU, attention uses the flash kernel that torch chooses on a GPU,
and RMSNorm is one kernel, as on a GPU if its input and gain have the same dtype.

Rules for counting:
- Kernels: each operator that torch dispatches, unless it only creates a view or allocates memory. A fused or
  foreach optimizer call is one kernel for all its tensors; on a device it is a few.
- Bytes: each input is read once and each output written once, regardless of caches; an argument that the operator's
  schema marks as modified is read and written. Operators that select rows or elements access only those.
- FLOPs: torch's formulas. Attention is one kernel: a causal flash kernel does half of the formula's FLOPs, and
  recomputes the scores in the backward pass (5 products for the forward pass's 2).
- Host reads: operators that wait for a value from the device, such as `.item()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine import build
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.model import loss, loss_chunk
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import RunPlan, plan_run
from ezpz_llm.training.trainer.run import make_engine

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """Kernel with the bytes that it reads and writes, and the FLOPs of its matmuls.

    `attention` marks a flash attention kernel, whose FLOPs run at a different rate.
    """

    name: str
    read: int
    written: int
    flops: float = 0.0
    attention: bool = False


@dataclass
class Step:
    """Kernels of an optimizer step in order, and operators that wait for the device."""

    kernels: list[Kernel] = field(default_factory=list)
    host_reads: list[str] = field(default_factory=list)


_LIBRARY = "ezpz_llm_roofline"


@torch.library.custom_op(f"{_LIBRARY}::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalized input and the reciprocals that the backward pass needs, without computing them."""
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(f"{_LIBRARY}::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, reciprocals: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and the gain, without computing them."""
    return torch.empty_like(x), torch.empty_like(weight)


for _operator in (_rms_norm, _rms_norm_backward):
    _operator.register_fake(_operator._init_fn)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        result, reciprocals = _rms_norm(x, weight)
        ctx.save_for_backward(x, weight, reciprocals)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _rms_norm_backward(grad, *ctx.saved_tensors)


def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Replace torch.nn.functional.rms_norm: inductor gets its operations, as on a GPU."""
    if torch.compiler.is_compiling() or x.dtype != weight.dtype:
        return torch.rms_norm(x, shape, weight, eps)
    return _FusedRmsNorm.apply(x, weight)


class Counter(TorchDispatchMode):
    """Dispatch mode that adds dispatched operators to `step`, except while paused."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()
        self._counts = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch runs compiled graphs under this mode instead of the original functions."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend counting."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._counts:
            return func(*args, **kwargs)
        if func in _HOST_READS:
            self.step.host_reads.append(func.overloadpacket.__name__)
            if func is aten._local_scalar_dense.default:
                return _ANY_NUMBER
        found = func(*args, **kwargs)
        if func.namespace in ("aten", _LIBRARY) and (kernel := kernel_of(func, args, kwargs, found)) is not None:
            self.step.kernels.append(kernel)
        return found


_HOST_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default,
               aten.masked_select.default)
_ANY_NUMBER = 1.0
_MEMORY = 80 * 10 ** 9
"""Device memory, from which the loss chooses its chunk size; more memory does not make chunks larger."""
_FLASH = (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward)
_RESERVES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WRITES_ONLY = {"copy_", "_foreach_copy_", "zero_", "fill_"}
_PICKS = {
    "embedding": lambda args, found: (_bytes(args[1]) + _bytes(found), _bytes(found)),
    "gather": lambda args, found: (_bytes(args[2]) + _bytes(found), _bytes(found)),
    "index_put_": lambda args, found: (_bytes(args[1]) + _bytes(args[2]), _bytes(args[2])),
}
"""Bytes read and written by operators that access only indexed elements instead of the whole tensor."""


def kernel_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> Kernel | None:
    """Return the kernel of an operator call; None if it launches none."""
    name = func.overloadpacket.__name__
    if name in _RESERVES:
        return None
    read = written = 0
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written += _bytes(value) * changed
        if not argument.is_out and not (changed and name in _WRITES_ONLY):
            read += _bytes(value)
    if not written:
        if _storages(found) <= _storages((args, kwargs)):
            return None
        written = _bytes(found)
    if name in _PICKS:
        read, written = _PICKS[name](args, found)
    return Kernel(name, read, written, *products_of(func, args, kwargs, found))


def products_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> tuple[float, bool]:
    """Return the FLOPs of an operator's matmuls, and True if it is flash attention."""
    count = flop_registry.get(func.overloadpacket)
    # torch's formulas do not accept the argument out_dtype.
    without_dtypes = [value for value in args if not isinstance(value, torch.dtype)]
    flops = count(*without_dtypes, **kwargs, out_val=found) if count else 0.0
    attention = func.overloadpacket in _FLASH
    return flops / 2 if attention else flops, attention


def _bytes(values: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tree_leaves(values) if isinstance(value, Tensor))


def _storages(values: Any) -> set[int]:
    return {value.untyped_storage()._cdata for value in tree_leaves(values) if isinstance(value, Tensor)}


def count_eager(plan: RunPlan) -> Step:
    """Count the second optimizer step of a plan's program; the first one allocates the moments."""
    with fake_engine(plan) as engine:
        samples = fake_samples(plan)
        take_step(engine, samples)
        with Counter() as counter:
            take_step(engine, samples)
    return counter.step


def plan_of(words: Sequence[str]) -> RunPlan:
    """Return the plan of a command line of `ezpz_llm.train` for one rank on a GPU.

    Raises:
        UserError: the plan is invalid, or attention in its precision does not use the flash kernel.
    """
    plan = plan_run(parse(words), 1, device="cuda")
    if not RECIPES[plan.resolved.precision].is_half:
        raise UserError(f"attention in {plan.resolved.precision} does not use the flash kernel",
                        where="--precision", instead="--precision bf16_autocast")
    return plan


@contextmanager
def fake_engine(plan: RunPlan) -> Iterator[Engine]:
    """Build the engine of a plan on one rank, with fake tensors and the branches of a GPU."""
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "benchmark"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                RunDir(Path("unused")))
    with (device_branches(), FakeTensorMode(), mock.patch.object(build, "give_storage", _give_fake_storage),
          mock.patch.object(build, "load_values"),
          mock.patch.object(loss, "adds_wide_products", return_value=True)):
        yield make_engine(plan, dist)


def fake_samples(plan: RunPlan) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets, (B, T), of each micro-batch of a step. Call it within `fake_engine`."""
    batch = plan.resolved.batch
    one = torch.empty(batch.micro_batch, plan.model.block_size, dtype=torch.long)
    return [(one, one)] * batch.accumulation


def take_step(engine: Engine, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take an optimizer step."""
    engine.train_step(samples, 1e-4, lambda phase: nullcontext())


def _give_fake_storage(model: nn.Module) -> None:
    """Replace the move from the meta device, which torch does not support for fake parameters."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    model._tie()
    model.to = lambda device: model  # the parameters are already in place


@contextmanager
def device_branches() -> Iterator[None]:
    """Make the model and the gradient norm take the branches of a GPU for tensors on the CPU.

    The code compares the device type with "cpu": replace this constant in its functions by one that never matches.
    """
    functions = {function: function.__code__ for prefix
                 in ("ezpz_llm.training.model.", "ezpz_llm.training.engine.gradients")
                 for function in _functions(prefix)}
    for function, code in functions.items():
        function.__code__ = _without_cpu(code)
    try:
        with (mock.patch.object(loss, "most_logits_on", return_value=loss_chunk.max_logits("cuda", _MEMORY)),
              mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _flash_attention),
              mock.patch.object(torch.nn.functional, "rms_norm", _fused_rms_norm)):
            yield
    finally:
        for function, code in functions.items():
            function.__code__ = code


def _functions(prefix: str) -> Iterator[FunctionType]:
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix):
            members = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
            members += [value for kind in members if isinstance(kind, type) for value in vars(kind).values()]
            functions = (getattr(value, "__func__", value) for value in members)  # static methods
            yield from {function for function in functions if isinstance(function, FunctionType)}


def _without_cpu(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(
        "not the cpu" if value == "cpu" else _without_cpu(value) if isinstance(value, CodeType) else value
        for value in code.co_consts))


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
                     enable_gqa: bool) -> Tensor:
    """Call the kernel that torch's scaled_dot_product_attention uses on a GPU; it supports grouped keys."""
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
