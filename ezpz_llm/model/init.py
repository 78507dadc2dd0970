"""Initial weights of every parameter, fixed by the seed and the names of the model's parameters.

Each parameter draws from its own generator on the CPU, so its values depend neither on the order in which
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

from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import (
    Box,
    decays,
    parameter_named,
    parameter_shapes,
    placement_of,
    unknown_parameter,
)


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter of `model` its initial weights, by the scheme of its configuration.

    Args:
        model: a GPT, or the part of one that a rank holds; see `ezpz_llm.model.parameters`.

    Raises:
        UserError: a parameter is not in the table.
    """
    numbers = {name: number for number, name in enumerate(sorted(parameter_shapes(config)))}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = placement_of(name, parameter)
            if at.name not in numbers:
                raise unknown_parameter(at.name)
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
    """The initial weights of the parameter `name`, fp32 on the CPU, by its rule in the table of parameters.

    Raises:
        UserError: the table has no such parameter. Zero, say, would take a gain out of the model without a word.
    """
    rule = parameter_named(name).initial
    if rule in ("zeros", "ones"):
        return torch.full(shape, float(rule == "ones"))
    draw = np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(draw).mul_(initial_std(config, name, fan_in=shape[1]))


def initial_std(config: ModelConfig, name: str, fan_in: int) -> float:
    """The standard deviation of a matrix's initial weights.

    "gpt2": 0.02 everywhere (Radford et al. 2019). "llama": 0.02 for the embedding, fan_in^-1/2 for linear layers.
    In both, the two projections into the residual stream are smaller by sqrt(2L), so that the sum of 2L of them
    keeps its scale with depth; for "llama" they start from C^-1/2, also where their fan_in is the MLP's width.
    """
    rule, is_llama = parameter_named(name).initial, config.init == "llama"
    if rule == "residual":
        return (config.n_embd ** -0.5 if is_llama else 0.02) / math.sqrt(2 * config.n_layer)
    return fan_in ** -0.5 if is_llama and rule == "linear" else 0.02


def decay_counts(config: ModelConfig) -> list[tuple[int, int]]:
    """Tensors and their elements in the two optimizer groups of the whole model, whatever a rank holds of it."""
    shapes = parameter_shapes(config).values()
    groups = [[math.prod(shape) for shape in shapes if decays(shape) is decayed] for decayed in (True, False)]
    return [(len(sizes), sum(sizes)) for sizes in groups]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups with keys "params", "names" and "weight_decay": first the decayed, then the others.

    Tensors with two or more dimensions (matrices and embeddings) decay; biases and norms do not. To be asked before
    an engine flattens parameters, which leaves them one dimension. A tied table is listed once.
    """
    named = list(model.named_parameters())
    decayed = [(name, p) for name, p in named if decays(p.shape)]
    others = [(name, p) for name, p in named if not decays(p.shape)]
    return [{"params": [p for _, p in group], "names": [name for name, _ in group], "weight_decay": decay}
            for group, decay in ((decayed, weight_decay), (others, 0.0))]
