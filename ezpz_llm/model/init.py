"""Initial weights of every parameter, fixed by the seed and the names of the model's parameters.

A matrix is drawn in tiles of TILE rows and columns, each from a generator of its own, so its values depend neither
on the order in which parameters are made nor on the device or the layout, and a rank that holds a slice draws the
tiles that the slice touches. The generator is NumPy's because torch's on CPU keeps 32 bits of a seed, and has two
forms of its normal draw that round differently (with AVX2 and without).
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
    Placement,
    decays,
    parameter_named,
    parameter_shapes,
    placement_of,
    size,
    unknown_parameter,
)

TILE = (64, 512)
"""Rows and columns that share a generator, which takes 20 us to make where 32,768 values take 250 us. Parts of
matrices over 64 data-parallel or 8 tensor-parallel ranks are multiples of them in the usual shapes."""

_AT_ONCE = 1 << 20
"""Elements that `fill` asks for at once, about: what a rank has in memory besides its own part."""

Values = Callable[[str, Box], torch.Tensor]
"""The plain model's name of a parameter and a box of it to that box's values: fp32, on CPU, in the box's shape."""

_ATTRIBUTE = "ezpz_values"


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter of `model` its initial weights, by the scheme of its configuration.

    Args:
        model: a GPT, or the part of one that a rank holds; see `ezpz_llm.model.parameters`.

    Raises:
        UserError: a parameter is not in the table.
    """
    load_values(model, initial_values(config, seed))


def load_values(model: nn.Module, values: Values) -> None:
    """Give every parameter of `model`, or of the part of one that a rank holds, its values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter.view(-1), placement_of(name, parameter), 0, values)


def fill(target: torch.Tensor, at: Placement, start: int, values: Values) -> None:
    """Write elements [start, start + n) of a rank's flattened parameter, a few rows at a time.

    Args:
        target: 1-D storage of n elements, on any device.
        at: where the parameter lies in the whole model.
    """
    offset = 0
    for box, first, last in at.pieces(start, start + target.numel()):
        (top, _), width = box[0], size(box[1:])
        # Up to a multiple of the rows of a tile, so that no tile is drawn twice.
        step = max(_AT_ONCE // (width * TILE[0]), 1) * TILE[0]
        row, end = top + first // width, top - (-last // width)
        while row < end:
            until = min(end, (row // step + 1) * step)
            begin, stop = max(first, (row - top) * width), min(last, (until - top) * width)
            rows = values(at.name, ((row, until), *box[1:])).reshape(-1)
            skipped = (row - top) * width
            target[offset:offset + stop - begin].copy_(rows[begin - skipped:stop - skipped])
            del rows  # before the next ones are made
            offset, row = offset + stop - begin, until


def defer_values(model: nn.Module, values: Values) -> None:
    """Let a model on the meta device remember its values for the engine that gives it storage."""
    setattr(model, _ATTRIBUTE, values)


def take_values(model: nn.Module) -> Values | None:
    """The values that a model on the meta device waits for, once; None where it has its values."""
    return model.__dict__.pop(_ATTRIBUTE, None)


def has_values(model: nn.Module) -> bool:
    """True if a model's parameters have storage and values, and do not wait for an engine's."""
    return _ATTRIBUTE not in model.__dict__


def initial_values(config: ModelConfig, seed: int) -> Values:
    """The initial weights that a seed gives the parameters of a model, box by box.

    Raises:
        UserError: from the values, the table of parameters has none of that name.
    """
    shapes = parameter_shapes(config)
    numbers = {name: number for number, name in enumerate(sorted(shapes))}

    def values(name: str, box: Box) -> torch.Tensor:
        """The part `box` of a parameter's initial weights, fp32 on the CPU."""
        if name not in numbers:
            raise unknown_parameter(name)
        rule = parameter_named(name).initial
        if rule in ("zeros", "ones"):
            return torch.full([stop - start for start, stop in box], float(rule == "ones"))
        std = initial_std(config, name, fan_in=shapes[name][1])
        return _normal(shapes[name][1], box, seed_for(seed, "init", numbers[name])).mul_(std)

    return values


def _normal(columns: int, box: Box, seed: int) -> torch.Tensor:
    """A box of a matrix of so many columns, of values of the standard normal distribution, fp32.

    Philox (Salmon et al. 2011) has a stream for every key of 128 bits: the seed and the tile's number.
    """
    (top, bottom), (left, right) = box
    height, width = TILE
    result = np.empty((bottom - top, right - left), dtype=np.float32)
    for first in range(top // height * height, bottom, height):
        for side in range(left // width * width, right, width):
            number = first // height * -(-columns // width) + side // width
            generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
            # Values come row by row: what lies below the box need not be drawn, and a matrix with more rows, as
            # of a padded vocabulary, begins alike.
            tile = generator.standard_normal((min(first + height, bottom) - first, min(width, columns - side)),
                                             dtype=np.float32)
            low, near, far = max(first, top), max(side, left), min(side + width, right)
            result[low - top:first + len(tile) - top, near - left:far - left] = \
                tile[low - first:, near - side:far - side]
    return torch.from_numpy(result)


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
