"""Tensor parallelism: shard the layers of a plain model over ranks, by the table of parameters.

As in Shoeybi et al. 2019 (arXiv:1909.08053), attention's heads and the MLP's hidden units are sharded in each
block. Attention and MLP communicate once each: at their end in the forward pass, at their start in the backward
pass. The vocabulary is sharded too, so no rank has whole logits in training or validation.

Symbols: B sequences, T tokens, C width, C_kv width of all keys, V padded vocabulary size, R ranks. Rank r has
the rows of token ids [r V/R, (r + 1) V/R).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.model.config import ModelConfig, Parameter, TpRule
from ezpz_llm.training.model.embedding import Columns, local_rows, lookup
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.loss import Head
from ezpz_llm.training.model.parameters import (
    Box,
    Placement,
    parameter_named,
    placement_of,
    set_placement,
    whole_box,
)
from ezpz_llm.training.model.tp_collectives import copy_to_tp_region, gather_last_dim, reduce_from_tp_region, summed

_REGIONS = ("attn", "mlp", "lm_head")
"""Modules that take whole activations and compute with sharded layers."""


@dataclass(frozen=True)
class Share:
    """Part `rank` of `size` equal parts."""

    rank: int
    size: int

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """Return this part of a range."""
        each = (stop - start) // self.size
        return start + self.rank * each, start + (self.rank + 1) * each


class _VocabularyEmbedding(nn.Module):
    """Embedding with this rank's vocabulary rows.

    The sum over ranks is exact, because only one rank's term is non-zero.
    """

    def __init__(self, rows: int, width: int, group: ProcessGroup | None, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.group, self.first = group, rank * rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up activations (B, T, C) for tokens (B, T)."""
        index, inside = local_rows(tokens, self.first, len(self.weight))
        rows = lookup(index, self.weight)
        return reduce_from_tp_region(rows.masked_fill(~inside[..., None], 0.0), self.group)


class RowParallelLinear(nn.Linear):
    """Linear layer with this rank's inputs; the bias is added once, to the sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: ProcessGroup | None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial products, and add the bias once."""
        total = reduce_from_tp_region(functional.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


class _ShardedRMSNorm(nn.Module):
    """RMSNorm over a sharded width; ranks communicate only the sums of squares."""

    def __init__(self, columns: int, share: Share, eps: float | None, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns))
        self.width, self.eps, self.group = columns * share.size, eps, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's columns (B, T, columns) by the mean square of all columns, in fp32."""
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        # Every rank's columns depend on the sum, so its gradient is summed over ranks too.
        squares = copy_to_tp_region(reduce_from_tp_region(squares, self.group), self.group)
        return wide * torch.rsqrt(squares / self.width + (self.eps or 0.0)) * self.weight


class RankedDropout(nn.Module):
    """Wrapper that draws different dropout masks on each rank, but keeps the ranks' generators in sync.

    The seed of the masks comes from the CPU generator, which is the same on all peers and needs no synchronization
    with the device. Restoring that generator, as activation checkpointing does before it recomputes a block,
    reproduces the masks.
    """

    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = inner, rank
        # A decorator would import torch's compiler with this module, which takes two seconds.
        self._eager = torch.compiler.disable(self._with_ranked_masks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention with dropout for this rank's heads, outside of compiled graphs."""
        return self._eager(q, k, v, *mask)

    def _with_ranked_masks(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        if not self.training:
            return self.inner(q, k, v, *mask)
        seed = seed_for(int(torch.randint(2**32, ())), "dropout", self.rank)
        if q.device.type == "cpu":
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                return self.inner(q, k, v, *mask)
        with torch.random.fork_rng(devices=[q.device.index], device_type=q.device.type):
            torch.get_device_module(q.device).manual_seed(seed)
            return self.inner(q, k, v, *mask)


def apply(model: GPT, group: ProcessGroup | None, rank: int, size: int) -> None:
    """Shard a model on the meta device over the `size` ranks of a group.

    Afterwards every parameter has a placement. Rank 0 owns replicated parameters. With targets, the model returns
    the same loss on every rank; without targets, whole logits.

    Args:
        group: None for the whole world.
        rank: this rank's index in the group.

    Raises:
        UserError: heads, hidden units or vocabulary are not divisible by `size`, or a parameter has no rule.
    """
    _check_divisible(model.config, size)
    share = Share(rank, size)
    for name, module in list(model.named_modules()):
        parameters = dict(module.named_parameters(recurse=False))
        rows = {key: _require_rule(f"{name}.{key}") for key in parameters}
        if "weight" in rows and rows["weight"].is_sharded:
            parts = [share.of(*part) for part in _consecutive_ranges(rows["weight"].parts(model.config))]
            model.set_submodule(name, _shard_layer(name, module, rows["weight"].tp, parts, share, group))
        else:
            for key, parameter in parameters.items():
                _set_whole_placement(f"{name}.{key}", parameter, share)
    if model.config.tied:
        model.lm_head.weight = model.transformer["wte"].weight
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in _REGIONS:
            module.register_forward_pre_hook(lambda _, inputs: (copy_to_tp_region(inputs[0], group), *inputs[1:]))
        if name.endswith("attn.product") and model.config.dropout:
            model.set_submodule(name, RankedDropout(module, rank))
    gather_logits(model, group, size)


def sum_gradients(model: nn.Module, group: ProcessGroup | None) -> None:
    """Register hooks that sum the gradients of "summed" parameters over the group during the backward pass.

    Call this after a model, or a pipeline stage of one, has storage: moving from the meta device creates new
    parameters.
    """
    for name, parameter in model.named_parameters():
        if parameter_named(placement_of(name, parameter).name).tp == "summed":
            parameter.register_hook(lambda gradient: summed(gradient, group).to(gradient.dtype))


def gather_logits(model: nn.Module, group: ProcessGroup | None, size: int) -> None:
    """Register a hook that gathers whole logits if a model, or its last stage, is called without targets."""
    def whole_logits(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output if output.dim() < 3 else gather_last_dim(output, group, size)

    model.register_forward_hook(whole_logits)


def _check_divisible(config: ModelConfig, size: int) -> None:
    """Reject a model that cannot be sharded over `size` ranks.

    Raises:
        UserError: heads, hidden units or vocabulary rows are not divisible by `size`.
    """
    for number, unit in ((config.n_kv_head, "key/value heads (n_kv_head)"),
                         (config.intermediate_size, "hidden units of the MLP (intermediate_size)"),
                         (config.padded_vocab_size,
                          "vocabulary rows (vocab_size up to a multiple of vocab_multiple)")):
        if number % size:
            raise UserError(f"{number} {unit} cannot be divided over {size} tensor-parallel ranks", where="tp",
                            instead=f"use tp {math.gcd(number, size)}, or a multiple of {size}")


def _require_rule(name: str) -> Parameter:
    row = parameter_named(name)
    if row.tp is None:
        raise UserError(f"{name} has no tensor-parallel rule in the table of parameters", where="tp",
                        instead=f"add one of {', '.join(get_args(TpRule))} to its row, or disable tp")
    return row


def _shard_layer(name: str, module: nn.Module, rule: TpRule | None, parts: Sequence[tuple[int, int]], share: Share,
                 group: ProcessGroup | None) -> nn.Module:
    """Create this rank's part of a layer, with placements but without values.

    Args:
        parts: this rank's ranges of weight rows.
    """
    if isinstance(module, nn.RMSNorm):
        return _shard_norm(name, module, parts, share, group)
    rows, columns = module.weight.shape
    bias = getattr(module, "bias", None)
    with module.weight.device:
        if rule == "row":
            start, stop = share.of(0, columns)
            result: nn.Module = RowParallelLinear(stop - start, rows, bias is not None, group)
            boxes: tuple[Box, ...] = (((0, rows), (start, stop)),)
        else:
            count = sum(stop - start for start, stop in parts)
            result = _build_row_shard(rule, count, columns, bias is not None, share, group)
            boxes = tuple((part, (0, columns)) for part in parts)
    set_placement(result.weight, Placement(f"{name}.weight", (rows, columns), boxes))
    if bias is not None and rule == "row":
        _set_whole_placement(f"{name}.bias", result.bias, share)
    elif bias is not None:
        set_placement(result.bias, Placement(f"{name}.bias", (rows,), tuple((part,) for part in parts)))
    return result


def _shard_norm(name: str, module: nn.RMSNorm, parts: Sequence[tuple[int, int]], share: Share,
                group: ProcessGroup | None) -> nn.Module:
    with module.weight.device:
        result = _ShardedRMSNorm(sum(stop - start for start, stop in parts), share, module.eps, group)
    set_placement(result.weight,
                  Placement(f"{name}.weight", tuple(module.weight.shape), tuple((part,) for part in parts)))
    return result


def _build_row_shard(rule: TpRule | None, rows: int, columns: int, bias: bool, share: Share,
                     group: ProcessGroup | None) -> nn.Module:
    """Create a layer with some rows of the plain layer's weight, which are outputs or vocabulary rows."""
    if rule == "vocabulary":
        return _VocabularyEmbedding(rows, columns, group, share.rank)
    if rule == "head":
        return Head(columns, rows, Columns(share.rank, share.size, group))
    return nn.Linear(columns, rows, bias=bias)


def _consecutive_ranges(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive parts."""
    start = 0
    for length in sizes:
        yield start, start + length
        start += length


def _set_whole_placement(name: str, parameter: nn.Parameter, share: Share) -> None:
    shape = tuple(parameter.shape)
    set_placement(parameter, Placement(name, shape, (whole_box(shape),), primary=share.rank == 0))
