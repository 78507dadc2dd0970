"""Initial weights, determined by the seed and the names of the model's parameters.

A matrix is drawn in tiles of TILE rows and columns, each with its own generator. Therefore the values do not depend
on the order of parameters, the device or the layout, and a rank with a slice draws only the tiles that overlap it.
The generator is NumPy's because torch's CPU generator uses only 32 bits of a seed, and draws normal values in two
ways that round differently (with and without AVX2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn

from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.model.config import ModelConfig, decays
from ezpz_llm.training.model.parameters import (
    Box,
    Placement,
    parameter_named,
    parameter_shapes,
    placement_of,
    size,
    unknown_parameter,
)

TILE = (64, 512)
"""Rows and columns per generator. Creating a generator takes 20 us, drawing its 32,768 values 250 us. For common
model widths, shards across 64 data-parallel or 8 tensor-parallel ranks are multiples of a tile."""

_AT_ONCE = 1 << 22
"""Approximate number of elements that `fill` draws at once; a rank needs memory for them besides its own part."""
_TILES_PER_THREAD = 8
"""Minimum number of tiles for which starting a thread is worthwhile."""

Values = Callable[[str, Box], torch.Tensor]
"""Function of a parameter's plain name and a box that returns values in the box's shape, in fp32 on CPU."""

_ATTRIBUTE = "ezpz_values"


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialize every parameter of `model` by the scheme of its configuration.

    Args:
        model: a GPT, or a rank's part of one; see `ezpz_llm.training.model.parameters`.

    Raises:
        UserError: a parameter is not in the table in `ezpz_llm.training.model.config`.
    """
    load_values(model, initial_values(config, seed))


def load_values(model: nn.Module, values: Values) -> None:
    """Set every parameter of a model, or of a rank's part of one, from `values`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter.view(-1), placement_of(name, parameter), 0, values)


def fill(target: torch.Tensor, at: Placement, start: int, values: Values) -> None:
    """Write elements [start, start + n) of a rank's flattened parameter, a few rows at a time.

    Args:
        target: 1-D tensor of n elements, on any device.
        at: placement of the parameter in the whole model.
    """
    offset = 0
    for box, first, last in at.pieces(start, start + target.numel()):
        (top, _), width = box[0], size(box[1:])
        # Stop at multiples of a tile's rows, so that no tile is drawn twice.
        step = max(_AT_ONCE // (width * TILE[0]), 1) * TILE[0]
        row, end = top + first // width, top - (-last // width)
        while row < end:
            until = min(end, (row // step + 1) * step)
            begin, stop = max(first, (row - top) * width), min(last, (until - top) * width)
            rows = values(at.name, ((row, until), *box[1:])).reshape(-1)
            skipped = (row - top) * width
            target[offset:offset + stop - begin].copy_(rows[begin - skipped:stop - skipped])
            del rows  # free the memory before drawing the next rows
            offset, row = offset + stop - begin, until


def defer_values(model: nn.Module, values: Values) -> None:
    """Attach `values` to a model on the meta device, for the engine that will allocate its parameters."""
    setattr(model, _ATTRIBUTE, values)


def take_values(model: nn.Module) -> Values | None:
    """Remove and return the deferred values of a model; None if the model is initialized."""
    return model.__dict__.pop(_ATTRIBUTE, None)


def has_values(model: nn.Module) -> bool:
    """Return True if a model's parameters are initialized rather than deferred."""
    return _ATTRIBUTE not in model.__dict__


def initial_values(config: ModelConfig, seed: int) -> Values:
    """Return a function that draws a model's initial weights for a seed, box by box.

    The function raises UserError for a name that is not in the table of parameters.
    """
    shapes = parameter_shapes(config)
    numbers = {name: number for number, name in enumerate(sorted(shapes))}

    def values(name: str, box: Box) -> torch.Tensor:
        """Return the part `box` of a parameter's initial weights, fp32 on CPU."""
        if name not in numbers:
            raise unknown_parameter(name)
        rule = parameter_named(name).initial
        if rule in ("zeros", "ones"):
            return torch.full([stop - start for start, stop in box], float(rule == "ones"))
        std = initial_std(config, name, fan_in=shapes[name][1])
        return _draw_normal(shapes[name][1], box, seed_for(seed, "init", numbers[name])).mul_(std)

    return values


def _draw_normal(columns: int, box: Box, seed: int) -> torch.Tensor:
    """Draw a box of a matrix with `columns` columns from the standard normal distribution, in fp32.

    Philox (Salmon et al. 2011) has a separate stream for each 128-bit key, which is the seed and the tile's index.
    """
    (top, bottom), (left, right) = box
    height, width = TILE
    result = np.empty((bottom - top, right - left), dtype=np.float32)

    def draw(corners: list[tuple[int, int]]) -> None:
        """Draw the tiles with these first rows and columns, and copy them to `result`."""
        for first, side in corners:
            number = first // height * -(-columns // width) + side // width
            generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
            # Values are drawn row by row, so rows below the box can be omitted, and a matrix with more rows (padded
            # vocabulary) starts with the same values.
            tile = generator.standard_normal((min(first + height, bottom) - first, min(width, columns - side)),
                                             dtype=np.float32)
            low, near, far = max(first, top), max(side, left), min(side + width, right)
            result[low - top:first + len(tile) - top, near - left:far - left] = \
                tile[low - first:, near - side:far - side]

    corners = list(itertools.product(range(top // height * height, bottom, height),
                                     range(left // width * width, right, width)))
    threads = min(torch.get_num_threads(), len(corners) // _TILES_PER_THREAD)
    if threads > 1:  # NumPy draws without the GIL
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, (corners[number::threads] for number in range(threads))))
    else:
        draw(corners)
    return torch.from_numpy(result)


def initial_std(config: ModelConfig, name: str, fan_in: int) -> float:
    """Return the standard deviation of a matrix's initial weights.

    "gpt2": 0.02 (Radford et al. 2019). "llama": 0.02 for the embedding, fan_in^-1/2 for linear layers. In both, the
    two projections into the residual stream are divided by sqrt(2L), so that the scale of the sum of 2L projections
    does not depend on depth; in "llama" the divided value is n_embd^-1/2, even if the fan_in is the MLP's width.
    """
    rule, is_llama = parameter_named(name).initial, config.init == "llama"
    if rule == "residual":
        return (config.n_embd ** -0.5 if is_llama else 0.02) / math.sqrt(2 * config.n_layer)
    return fan_in ** -0.5 if is_llama and rule == "linear" else 0.02


def decay_counts(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the numbers of tensors and elements in the two optimizer groups of the whole model."""
    shapes = parameter_shapes(config).values()
    groups = [[math.prod(shape) for shape in shapes if decays(shape) is decayed] for decayed in (True, False)]
    return [(len(sizes), sum(sizes)) for sizes in groups]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two optimizer groups with keys "params", "names" and "weight_decay": decayed, then undecayed.

    Tensors with two or more dimensions (matrices and embeddings) decay; biases and norms do not. Call this before
    an engine flattens parameters to one dimension. A tied embedding is listed once. Names are those of the plain
    model.
    """
    named = [(placement_of(name, parameter).name, parameter) for name, parameter in model.named_parameters()]
    decayed = [(name, p) for name, p in named if decays(p.shape)]
    undecayed = [(name, p) for name, p in named if not decays(p.shape)]
    return [{"params": [p for _, p in group], "names": [name for name, _ in group], "weight_decay": decay}
            for group, decay in ((decayed, weight_decay), (undecayed, 0.0))]
