"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ezpz_llm.training.dist.torch_internals import compile_times

Compiler = Callable[..., Any] | str
"""Backend of torch.compile: its name, or a function of a graph and example inputs."""


def compile_blocks(model: nn.Module, compiler: Compiler = "inductor") -> None:
    """Compile each block in place, and the head's chunked loss if this part of the model has a head.

    Names and parameters do not change, and all blocks share one compiled graph. Compiling blocks instead of the
    whole model compiles one small graph instead of L copies, and lets engines gather parameters and communicate
    between blocks. The default mode captures no CUDA graphs, whose reused output memory would break gradient
    accumulation.

    Args:
        compiler: backend of torch.compile.
    """
    for block in model.transformer["h"]:
        block.compile(backend=compiler)
    if hasattr(model, "lm_head"):
        model.lm_head.compiler = compiler


def seconds_compiling() -> float:
    """Return the seconds of torch.compile in this process so far, for forward and backward passes."""
    return compile_times().get("total_wall_time", 0.0)


def eager() -> AbstractContextManager[None]:
    """Make compiled modules run eagerly, for evaluation, whose different shapes would trigger recompilation."""
    return torch.compiler.set_stance("force_eager")
