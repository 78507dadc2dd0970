"""torch.compile and activation checkpointing, block by block."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from ezpz_llm.dist.private_names import compile_times


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place: names and parameters stay, and all blocks share one compiled graph.

    Likewise the head's chunked loss, where this part of the model has a head.

    Blocks and not the whole model, so that one small graph is compiled instead of L copies, and engines can gather
    parameters or split communication between blocks. The default mode captures no CUDA graphs, whose reused output
    memory would break gradient accumulation.
    """
    for block in model.transformer["h"]:
        block.compile()
    if hasattr(model, "lm_head"):
        model.lm_head.compiled = True


def seconds_compiling() -> float:
    """What torch.compile has taken in this process so far, for forward and backward passes."""
    return compile_times().get("total_wall_time", 0.0)


def eager() -> AbstractContextManager[None]:
    """Within it compiled modules run eagerly: for evaluation, whose other shapes would trigger recompilation."""
    return torch.compiler.set_stance("force_eager")


def recompute_blocks(model: nn.Module, every: int) -> None:
    """Recompute the activations of every `every`-th block in the backward pass; 0 for none.

    Activation checkpointing (Chen et al. 2016, arXiv:1604.06174).

    To be asked before an engine wraps the blocks, so that what it gathers for a block is there for both passes.

    Args:
        model: a GPT or a stage of one. Blocks count from the whole model's first, whichever stage they are in.
    """
    if not every:
        return
    for number, block in model.transformer["h"].named_children():
        if (int(number) + 1) % every == 0:
            block.recomputes = True
