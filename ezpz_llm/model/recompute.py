"""Activation checkpointing: compute activations twice instead of keeping them (Chen et al. 2016, arXiv:1604.06174).

A block whose activations are recomputed keeps only its input until the backward pass, which runs the block's
forward pass again, with the same random numbers, before it computes gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(model: nn.Module, every: int) -> None:
    """Recompute the activations of every `every`-th block in the backward pass; 0 for none.

    To be asked before an engine wraps the blocks, so that what it gathers for a block is there for both passes.

    Args:
        model: a GPT or a stage of one. Blocks count from the whole model's first, whichever stage they are in.
    """
    if not every:
        return
    for number, block in model.transformer["h"].named_children():
        if (int(number) + 1) % every == 0:
            block.forward = _twice(block.forward)


def _twice(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # A function of our own and no partial of torch's: torch.compile leaves calls that begin in torch's code alone.
    @functools.wraps(inner)
    def forward(*args: Any) -> Tensor:
        return checkpoint(inner, *args, use_reentrant=False)

    return forward
