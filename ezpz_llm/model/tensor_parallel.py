"""Tensor parallelism: layers divided over ranks, by a table, from outside the plain model.

After Shoeybi et al. 2019 (arXiv:1909.08053): in each block attention's heads and the MLP's hidden units are
divided, so that attention and MLP communicate once each, in the forward pass at their end, in the backward pass at
their start. The vocabulary is divided too, and no rank has whole logits in training or validation.

Symbols: C width, C_kv width of all keys, V padded vocabulary, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.embedding import Columns, VocabularyEmbedding
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.head import Head
from ezpz_llm.model.parameters import Box, Placement, place, whole
from ezpz_llm.model.tp_collectives import enter_region, join_last, leave_region

Style = Literal["column", "row", "vocabulary", "head"]
"""How a layer is divided: "column": its outputs, the rows of its weight and bias. "row": its inputs, the columns of
its weight; outputs are then summed, and the bias is whole. "vocabulary": the rows of a token table. "head": its
outputs, and the loss of them."""

REGIONS = ("attn", "mlp", "lm_head")
"""Modules that get whole activations and compute with divided layers."""


@dataclass(frozen=True)
class Rule:
    """Modules whose name ends so are divided in this style; `parts` are the numbers of rows to be divided each."""

    suffix: str
    style: Style
    parts: tuple[int, ...] = ()


def plan(config: ModelConfig) -> tuple[Rule, ...]:
    """Which layers are divided, and how."""
    return (
        Rule("wte", "vocabulary"),
        Rule("attn.c_attn", "column", (config.n_embd, config.kv_width, config.kv_width)),
        Rule("attn.c_proj", "row"),
        Rule("mlp.c_fc", "column"),
        Rule("mlp.c_gate", "column"),
        Rule("mlp.c_proj", "row"),
        Rule("lm_head", "head"),
    )


@dataclass(frozen=True)
class Share:
    """Part number `rank` of `size` equal ones."""

    rank: int
    size: int

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """This part of a range."""
        each = (stop - start) // self.size
        return start + self.rank * each, start + (self.rank + 1) * each


class RowParallelLinear(nn.Linear):
    """A linear layer of which this rank has some inputs; the bias is added once, to the sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: ProcessGroup | None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        total = leave_region(functional.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


class RankedDropout(nn.Module):
    """A module with dropout that draws another mask on each rank, while the ranks' generators stay alike.

    The number that seeds the masks comes from the host's generator, which is the same on all peers and needs no
    synchronisation with the device. Whoever restores that generator, as activation checkpointing does before it
    computes a block again, gets the same masks.
    """

    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = inner, rank

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.training:
            return self.inner(q, k, v)
        seed = seed_for(int(torch.randint(2**32, ())), "dropout", self.rank)
        if q.device.type == "cpu":
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                return self.inner(q, k, v)
        with torch.random.fork_rng(devices=[q.device.index], device_type=q.device.type):
            torch.get_device_module(q.device).manual_seed(seed)
            return self.inner(q, k, v)


def apply(model: GPT, group: ProcessGroup | None, rank: int, size: int) -> None:
    """Divide a model on the meta device over the `size` ranks of a group, of which this is number `rank`.

    Afterwards every parameter is placed. Parameters that stay whole are alike on all ranks, and rank 0 answers for
    them. With targets the model gives the same loss on every rank, without them whole logits.

    Args:
        group: None for the whole world.

    Raises:
        UserError: heads, hidden units or vocabulary cannot be divided so.
    """
    check_divisible(model.config, size)
    share = Share(rank, size)
    rules = plan(model.config)
    for name, module in list(model.named_modules()):
        rule = next((rule for rule in rules if f".{name}".endswith(f".{rule.suffix}")), None)
        if rule is not None:
            model.set_submodule(name, _divided(name, module, rule, share, group))
        else:
            for own, parameter in module.named_parameters(recurse=False):
                _place_whole(f"{name}.{own}", parameter, share)
    if model.config.tied:
        model.lm_head.weight = model.transformer["wte"].weight
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in REGIONS:
            module.register_forward_pre_hook(lambda _, inputs: (enter_region(inputs[0], group), *inputs[1:]))
        if name.endswith("attn.product") and model.config.dropout:
            model.set_submodule(name, RankedDropout(module, rank))
    gather_logits(model, group, size)


def gather_logits(model: nn.Module, group: ProcessGroup | None, size: int) -> None:
    """Let a model, or the last stage of one, give whole logits where it is called without targets."""
    def whole_logits(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output if output.dim() < 3 else join_last(output, group, size)

    model.register_forward_hook(whole_logits)


def check_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a shape that cannot be divided over `size` ranks.

    Raises:
        UserError: names what does not divide.
    """
    for number, what in ((config.n_kv_head, "key/value heads (n_kv_head)"),
                         (config.intermediate_size, "hidden units of the MLP (intermediate_size)"),
                         (config.padded_vocab_size,
                          "rows of the token table (vocab_size up to a multiple of vocab_multiple)")):
        if number % size:
            raise UserError(f"{number} {what} cannot be divided over {size} tensor-parallel ranks", where="tp",
                            instead=f"tp {math.gcd(number, size)}, or a multiple of {size}")


def _divided(name: str, module: nn.Module, rule: Rule, share: Share, group: ProcessGroup | None) -> nn.Module:
    """This rank's part of a layer, its parameters placed, without values."""
    rows, columns = module.weight.shape
    bias = getattr(module, "bias", None)
    parts = [share.of(start, stop) for start, stop in _parts(rule, rows)]
    with module.weight.device:
        if rule.style == "row":
            start, stop = share.of(0, columns)
            result: nn.Module = RowParallelLinear(stop - start, rows, bias is not None, group)
            boxes: tuple[Box, ...] = (((0, rows), (start, stop)),)
        else:
            count = sum(stop - start for start, stop in parts)
            result = _by_rows(rule.style, count, columns, bias is not None, share, group)
            boxes = tuple((part, (0, columns)) for part in parts)
    place(result.weight, Placement(f"{name}.weight", (rows, columns), boxes))
    if bias is not None and rule.style == "row":
        _place_whole(f"{name}.bias", result.bias, share)
    elif bias is not None:
        place(result.bias, Placement(f"{name}.bias", (rows,), tuple((part,) for part in parts)))
    return result


def _by_rows(style: Style, rows: int, columns: int, bias: bool, share: Share,
             group: ProcessGroup | None) -> nn.Module:
    """A layer with some rows of the plain one's weight, which are its outputs or its tokens."""
    if style == "vocabulary":
        return VocabularyEmbedding(rows, columns, group, share.rank)
    if style == "head":
        return Head(columns, rows, Columns(share.rank, share.size, group))
    return nn.Linear(columns, rows, bias=bias)


def _parts(rule: Rule, rows: int) -> Iterator[tuple[int, int]]:
    start = 0
    for length in rule.parts or (rows,):
        yield start, start + length
        start += length


def _place_whole(name: str, parameter: nn.Parameter, share: Share) -> None:
    shape = tuple(parameter.shape)
    place(parameter, Placement(name, shape, (whole(shape),), primary=share.rank == 0))
