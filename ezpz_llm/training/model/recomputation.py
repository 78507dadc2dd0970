"""Activation checkpointing of blocks: whole, or everything except the outputs of matmuls and attention.

Whole blocks: Chen et al. 2016, arXiv:1604.06174. Selective: the choice of Korthikanti et al. 2022,
arXiv:2205.05198, reversed, because fused attention keeps no scores: norms, activations, rotations, and casts are
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ezpz_llm.training.model.blockwise_attention import BLOCKWISE_OPERATOR
from ezpz_llm.training.model.config import Recompute

_PRODUCTS = ("mm", "addmm")
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
              "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_fused_attention_overrideable")


def recompute_blocks(model: nn.Module, recompute: Recompute) -> None:
    """Enable activation checkpointing.

    Call this before an engine wraps the blocks, so that parameters that the engine gathers for a block are
    available in both passes.

    Args:
        model: a GPT or a stage of one. Blocks are counted from the first block of the whole model.
        recompute: whole blocks, every `recompute`-th one (0: none), or "selective": all blocks, but not the outputs
            of matmuls and attention.
    """
    selects: dict[str, Any] | None = None
    for number, block in model.transformer["h"].named_children():
        if recompute == "selective":
            # One object for all blocks, which then share one compiled graph.
            selects = selects or {"context_fn": partial(create_selective_checkpoint_contexts, _policy(block))}
            block.checkpointing = selects
        elif recompute and (int(number) + 1) % recompute == 0:
            block.checkpointing = {}


def _policy(block: nn.Module) -> Callable[..., CheckpointPolicy]:
    """Return the policy of selective recomputation for blocks of this shape.

    With dropout, attention is recomputed: if its output were kept, it would not draw its random numbers again, and
    later dropout masks would differ.
    """
    attention = frozenset[Any]() if block.attn.drop.p else _overloads(_ATTENTION) | {BLOCKWISE_OPERATOR}
    last = block.mlp.c_proj.weight.shape
    # Nothing needs the last product of a block, unless a norm follows.
    unneeded = None if block.norms_after or block.attn.c_proj.weight.shape == last else last[::-1]
    return partial(_keep, _overloads(_PRODUCTS), attention, unneeded)


def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def _keep(products: frozenset[Any], attention: frozenset[Any], unneeded: torch.Size | None, _: Any, operator: Any,
          *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether an operator's output is kept.

    Args:
        unneeded: shape of the second factor of the product that is not kept.
    """
    if operator in attention or (operator in products and args[-1].shape != unneeded):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
