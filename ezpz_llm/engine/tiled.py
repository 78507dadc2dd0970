"""Memory-centric tiling (Rajbhandari et al. 2021, arXiv:2104.07857): layers that are too large to gather whole.

Under ZeRO 3 a linear layer is gathered when it computes. As a grid of smaller ones, DeepSpeed's TiledLinear, it is
gathered tile by tile, so that a tile is the most that has to fit beside everything else.
"""

from __future__ import annotations

import itertools

from torch import nn

from ezpz_llm.engine.deepspeed_import import import_deepspeed
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.placement import Placement, place


def apply(model: GPT, tiled: tuple[tuple[str, int, int], ...], device_type: str) -> None:
    """Cut linear layers of a model on the meta device into tiles; every tile is placed in the plain layer.

    Args:
        tiled: (name within a block, tiles along the input, tiles along the output). A name that a block has not,
            such as the gate of an MLP without one, is left out.
        device_type: what DeepSpeed is imported for.
    """
    import_deepspeed(device_type)
    for (number, block), (name, across, down) in itertools.product(model.transformer["h"].named_children(), tiled):
        owner, _, own = name.rpartition(".")
        layer = getattr(block.get_submodule(owner), own, None)
        if layer is not None:
            block.set_submodule(name, _tiles(f"transformer.h.{number}.{name}", layer, across, down))


def _tiles(name: str, layer: nn.Linear, across: int, down: int) -> nn.Module:
    from deepspeed.runtime.zero.tiling import TiledLinear

    rows, columns = layer.weight.shape
    with layer.weight.device:
        tiles = TiledLinear(columns, rows, layer.bias is not None, in_splits=across, out_splits=down)
    for row, column in itertools.product(range(down), range(across)):
        tile = tiles.linears[row][column]
        outputs = (tiles.out_parts[row], tiles.out_parts[row + 1])
        inputs = (tiles.in_parts[column], tiles.in_parts[column + 1])
        place(tile.weight, Placement(f"{name}.weight", (rows, columns), ((outputs, inputs),)))
        if tile.bias is not None:
            place(tile.bias, Placement(f"{name}.bias", (rows,), ((outputs,),)))
    return tiles
