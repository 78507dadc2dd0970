"""Checks of the dtypes in precision recipes, and of sums that must be computed in fp32.

In a full step, the noise of bf16 matmuls hides a sum over tokens, chunks or micro-steps that is accumulated in
bf16. Here each sum is checked alone, over many terms. Rounding the result once gives an error of up to 2^-8, but
rounding after every term loses most of the sum.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.attention_kernels import blockwise_attention
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.embedding import TiedEmbedding
from ezpz_llm.training.model.gpt import make_norm
from ezpz_llm.training.model.loss import Head
from ezpz_llm.training.model.tp_collectives import reduce_from_tp_region
from ezpz_llm.verify.certify import recipe
from ezpz_llm.verify.certify.loss_scaling import ACCUMULATION, BATCH, micro_batches, single_cpu_rank, small_config
from ezpz_llm.verify.certify.reference import make_engine

ROUNDING = 2.0 ** -8
_TERMS = 4096
DTYPES = {"fp32": (torch.float32, torch.float32), "bf16_autocast": (torch.float32, torch.bfloat16),
          "bf16": (torch.bfloat16, torch.bfloat16)}
"""Dtypes of parameters and of matmul outputs, by recipe. Master weights, moments and the loss are always fp32."""


def find_problems() -> Iterator[str]:
    """Yield a message for each wrong dtype, and for each sum that is not computed in fp32."""
    for name in recipe.MODELS:
        yield from _check_against_fp64(f"the norm of {name}", make_norm(get_model_config(name)),
                                       lambda norm, x: norm(x), (_norm_width(name),))
    for tied in (False, True):
        yield from _check_lookup(tied)
    yield from _check_head()
    yield from _check_attention()
    with single_cpu_rank() as single:
        for name in DTYPES:
            yield from _check_recipe(name, single)
        yield from _check_micro_steps(single)
        yield from _check_sums_over_ranks(single)


def _norm_width(name: str) -> int:
    """Return the width of a model's norms (C)."""
    return get_model_config(name).n_embd


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


def _check_against_fp64(label: str, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor],
                        shape: tuple[int, ...]) -> Iterator[str]:
    """Compare gradients of bf16 parameters, summed over TERMS tokens, with gradients computed in fp64."""
    generator = torch.Generator().manual_seed(0)
    rounded = module.bfloat16()
    exact = copy.deepcopy(rounded).double()
    x = torch.randn(_TERMS, *shape, generator=generator).bfloat16()
    gradient = torch.randn(x.shape, generator=generator).add_(0.5).bfloat16()
    call(rounded, x).backward(gradient)
    call(exact, x.double()).backward(gradient.double())
    for (name, parameter), reference in zip(rounded.named_parameters(), exact.parameters(), strict=True):
        if not (error := _relative_error(parameter.grad, reference.grad)) <= ROUNDING:
            yield (f"{label}: the gradient of its {name} over {_TERMS} tokens in bf16 has a relative error of "
                   f"{error:.2g}, more than one rounding")


def _check_lookup(tied: bool) -> Iterator[str]:
    tokens = torch.zeros(8, _TERMS // 8, dtype=torch.long)
    tokens[0, :3] = torch.tensor([5, 7, 5])
    gradient = torch.rand(*tokens.shape, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = TiedEmbedding(9, 4).bfloat16()
    table.tied = tied
    table(tokens).backward(gradient)
    exact = torch.zeros(9, 4, dtype=torch.float64).index_add_(0, tokens.flatten(), gradient.flatten(0, 1).double())
    if not (error := _relative_error(table.weight.grad.to_dense(), exact)) <= ROUNDING:
        yield (f"the embedding gradient of a token that occurs {_TERMS - 3} times has a relative error of "
               f"{error:.2g} in bf16")



def _check_head() -> Iterator[str]:
    """Check the gradient of the head's weight, to which each chunk of the loss adds."""
    generator = torch.Generator().manual_seed(0)
    head = Head(16, 64).bfloat16()
    exact = copy.deepcopy(head).double()
    head.loss_chunk, exact.loss_chunk = 16, 0
    x = torch.randn(4, _TERMS // 4, 16, generator=generator).bfloat16()
    targets = torch.zeros(4, _TERMS // 4, dtype=torch.long)
    head(x, targets).backward()
    exact(x.double(), targets).backward()
    if not (error := _relative_error(head.weight.grad, exact.weight.grad)) <= 2 * ROUNDING:
        yield f"the gradient of the head over {_TERMS // 16} chunks has a relative error of {error:.2g} in bf16"


def _check_attention() -> Iterator[str]:
    """Check ezpz_llm's blockwise attention, in which keys get gradients from all later blocks of rows.

    It is meant for bf16, but checked in fp32, where it differs from plain attention only by the summation order.
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, length, dim = 4, 2, 300, 32
    parts = [torch.randn(2, count, length, dim, generator=generator)
             for count in (heads, kv_heads, kv_heads, heads)]

    def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention, softmax(q k / sqrt D) v."""
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return torch.softmax((q @ k.mT / math.sqrt(dim)).masked_fill(future, -math.inf), dim=-1) @ v

    results = []
    for attention, dtype in ((blockwise_attention, torch.float32), (by_definition, torch.float64)):
        leaves = [part.to(dtype, copy=True).requires_grad_() for part in parts[:3]]
        out = attention(*leaves)
        out.backward(parts[3].to(dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    names = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")
    for name, actual, expected in zip(names, *results, strict=True):
        if not (error := _relative_error(actual, expected)) <= 2e-6:
            yield f"{name} of blockwise attention over {length} tokens has a relative error of {error:.2g} in fp32"


def _engine(precision: str, single: Dist) -> MicroStepEngine:
    resolved = resolve(Request("ddp", world_size=1, global_batch=BATCH, accumulation=ACCUMULATION, clip=recipe.CLIP,
                               precision=precision, device=single.device.type))
    engine = make_engine(small_config(), resolved, single)
    assert isinstance(engine, MicroStepEngine)
    return engine


def _check_recipe(name: str, single: Dist) -> Iterator[str]:
    """Check the dtypes of parameters, matmuls, master weights, moments and loss, and the initial master weights."""
    parameters, products = DTYPES[name]
    engine = _engine(name, single)
    start = {piece.name: piece.tensors["weight"].clone() for piece in engine.training_state().slices()}
    output_dtypes: list[torch.dtype] = []
    for module in engine.module.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda _, inputs, output: output_dtypes.append(output.dtype))
    for training in (True, False):
        output_dtypes.clear()
        engine.module.train(training)
        loss = engine.module(*micro_batches(0)[0])
        where = f"{name}, in {'training' if training else 'evaluation'}"
        if set(output_dtypes) != {products}:
            yield f"{where}: matmul outputs are {', '.join(sorted(map(str, set(output_dtypes))))}, not {products}"
        if loss.dtype != torch.float32:
            yield f"{where}: the loss is {loss.dtype}, not torch.float32"
    if {parameter.dtype for parameter in engine.module.parameters()} != {parameters}:
        yield f"{name}: parameters are not {parameters}"
    if (engine.masters is not None) != (parameters != torch.float32):
        yield f"{name}: the engine has {'no ' if engine.masters is None else 'unexpected '}master weights"
    dtypes = {tensor.dtype for piece in engine.training_state().slices() for tensor in piece.tensors.values()}
    if dtypes != {torch.float32}:
        yield f"{name}: some weights or moments are not fp32"
    if any(not torch.equal(value, value.to(parameters).float()) for value in start.values()):
        yield f"{name}: initial weights are not rounded to {parameters}, as they are in every other layout"


def _check_micro_steps(single: Dist) -> Iterator[str]:
    """Check that gradients of bf16 parameters are accumulated over micro-steps in fp32, bit by bit."""
    engine = _engine("bf16", single)
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        """Add the gradient of one micro-step."""
        sums[name] += gradient.float()

    for name, parameter in engine.module.named_parameters():
        if name != "transformer.wte.weight":  # tied: its two gradients are added before the hook sees them
            sums[name] = torch.zeros(parameter.shape)
            parameter.register_hook(partial(add, name))
    batches = micro_batches(0)
    for number, batch in enumerate(batches):
        engine.backward(engine.module(*batch), is_last=number == len(batches) - 1)
    assert engine.masters is not None
    engine.show_gradients()
    for name, parameter in engine.module.named_parameters():
        if name in sums and not torch.equal(engine.masters[parameter].grad, sums[name]):
            yield f"gradients of {name} are not accumulated in fp32 over micro-steps"
            return


def _check_sums_over_ranks(single: Dist) -> Iterator[str]:
    """Check that sums over tensor-parallel ranks have the dtype of the residual stream: fp32 under autocast."""
    single.ensure_group()
    for casts, expected in ((True, torch.float32), (False, torch.bfloat16)):
        x = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            total = reduce_from_tp_region(x, None)
        if total.dtype != expected:
            yield (f"sums over tensor-parallel ranks {'under autocast ' if casts else ''}are {total.dtype}, not "
                   f"{expected}")
