"""The first values of every parameter, fixed by the seed and the names of the model's parameters.

Each parameter draws from its own generator on the host, so its values depend neither on the order in which
parameters are made nor on the device or the layout: a rank that holds only a slice can draw the whole and cut.
The generator is NumPy's because torch's on CPU keeps 32 bits of a seed, and has two forms of its normal draw
that round differently (with AVX2 and without).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.parameters import Box, placement_of


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter of `model` its first value, by the scheme of its configuration.

    Args:
        model: a GPT, or the part of one that a rank holds; see `ezpz_llm.model.parameters`.
    """
    with torch.device("meta"):
        numbers = {name: number for number, name in enumerate(sorted(dict(GPT(config).named_parameters())))}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = placement_of(name, parameter)
            value = initial_value(config, at.name, at.shape, seed_for(seed, "init", numbers[at.name]))
            boxes = [value[tuple(slice(*side) for side in box)].flatten() for box in at.boxes]
            parameter.copy_(torch.cat(boxes).view_as(parameter))


def load_values(model: nn.Module, read: Callable[[str, Box], torch.Tensor]) -> None:
    """Give every parameter of `model`, or of the part of one that a rank holds, the values that `read` has for it.

    Args:
        read: the plain model's name of a parameter and a box of it to that box's values.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = placement_of(name, parameter)
            parameter.copy_(torch.cat([read(at.name, box).flatten() for box in at.boxes]).view_as(parameter))


def initial_value(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The first value of the parameter `name`, fp32 on the host: biases 0, norms 1, matrices normal.

    Raises:
        UserError: a vector that is neither. Zero, say, would take a gain out of the model without a word.
    """
    if len(shape) < 2:
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if ".ln_" in name and name.endswith(".weight"):
            return torch.ones(shape)
        raise UserError(f"no first value is known for the vector {name}: it is neither a bias nor a norm's weight",
                        where="model/init.py", instead="a rule for it in initial_value", exit_code=1)
    draw = np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(draw).mul_(initial_std(config, name, fan_in=shape[1]))


def initial_std(config: ModelConfig, name: str, fan_in: int) -> float:
    """The standard deviation of a matrix's first values.

    "gpt2": 0.02 everywhere (Radford et al. 2019). "llama": 0.02 for the embedding, fan_in^-1/2 for linear layers.
    In both, the two projections into the residual stream are smaller by sqrt(2L), so that the sum of 2L of them
    keeps its scale with depth; for "llama" they start from C^-1/2, also where their fan_in is the MLP's width.
    """
    is_llama = config.init == "llama"
    if name.endswith(".c_proj.weight"):
        return (config.n_embd ** -0.5 if is_llama else 0.02) / math.sqrt(2 * config.n_layer)
    if is_llama and not name.startswith(("transformer.wte.", "transformer.wpe.")):
        return fan_in ** -0.5
    return 0.02


# Which parameters weight decay pulls on.
def decay_counts(config: ModelConfig) -> list[tuple[int, int]]:
    """Tensors and their elements in the two groups of the whole model, whatever a rank holds of it."""
    with torch.device("meta"):
        groups = decay_groups(GPT(config), 0.0)
    return [(len(group["params"]), sum(parameter.numel() for parameter in group["params"])) for group in groups]


def parameter_names(config: ModelConfig) -> list[str]:
    """Of the whole model, whatever a rank holds of it; a tied table is listed once."""
    with torch.device("meta"):
        return [name for name, _ in GPT(config).named_parameters()]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups with keys "params", "names" and "weight_decay": first the decayed, then the others.

    Tensors with two or more dimensions (matrices and embeddings) decay; biases and norms do not. To be asked before
    an engine flattens parameters, which leaves them one dimension. A tied table is listed once.
    """
    named = list(model.named_parameters())
    decayed = [(name, p) for name, p in named if p.dim() >= 2]
    others = [(name, p) for name, p in named if p.dim() < 2]
    return [{"params": [p for _, p in group], "names": [name for name, _ in group], "weight_decay": decay}
            for group, decay in ((decayed, weight_decay), (others, 0.0))]
