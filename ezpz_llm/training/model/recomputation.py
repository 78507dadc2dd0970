"""Activation checkpointing of blocks: whole, or everything except the outputs of matmuls and attention.

Whole blocks: Chen et al. 2016, arXiv:1604.06174. Selective: Korthikanti et al. 2022, arXiv:2205.05198, recompute
attention and keep the rest. Fused attention keeps no scores, so here attention is kept, and norms, activations,
rotations, and casts are recomputed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ezpz_llm.core.base import UserError
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
            of matmuls and attention. Not for ZeRO stage 3, whose linear layers change these outputs.

    Raises:
        UserError: selective recomputation after DeepSpeed has replaced torch's linear layer in this process.
    """
    blocks = model.transformer["h"]
    if recompute == "selective":
        if not inspect.isbuiltin(functional.linear):
            raise UserError("selective recomputation requires torch's linear layer, which DeepSpeed has replaced "
                            "in this process", instead="a new process, or --recompute 1")
        # One object for all blocks, which then share one compiled graph.
        selected = {"context_fn": _selection(next(iter(blocks)))}
        for block in blocks:
            block.checkpointing = selected
    elif recompute:
        for number, block in blocks.named_children():
            if (int(number) + 1) % recompute == 0:
                block.checkpointing = {}


def _selection(block: nn.Module) -> Callable[..., Any]:
    """Return the function that selects what is kept, for blocks of this shape.

    With dropout, attention is recomputed: if its output were kept, it would not draw its random numbers again, and
    later dropout masks would differ.
    """
    attention = frozenset[Any]() if block.attn.drop.p else _overloads(_ATTENTION) | {BLOCKWISE_OPERATOR}
    last = block.mlp.c_proj
    shapes = [layer.weight.shape for layer in block.modules()
              if isinstance(layer, nn.Linear) and layer is not last]
    # Nothing needs the last product of a block, unless a norm follows. Its shape tells it from the others.
    unneeded = None if block.norms_after or last.weight.shape in shapes else last.weight.shape[::-1]
    policy = partial(_keep, _overloads(_PRODUCTS), attention, unneeded)
    selection: Any = partial(create_selective_checkpoint_contexts, policy)
    # torch caches compiled code only if it knows which policy it was compiled with.
    selection.cache_hash = f"ezpz_llm 1 {bool(attention)} {unneeded}"
    return selection


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
