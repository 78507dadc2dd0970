"""Where a rank's parameters lie in the whole model (imports no torch).

A layout may cut a parameter, rename it, or keep a second copy of it. What it holds stays addressable in the plain
model's terms: by the plain name, the whole shape, and the boxes that a rank's part consists of. First values,
checkpoints and certificates all speak these terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.model.config import ModelConfig

Box = tuple[tuple[int, int], ...]
"""An n-dimensional part of a tensor: one half-open range per dimension."""

_ATTRIBUTE = "ezpz_placement"


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def size(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True)
class Placement:
    """What a rank's parameter is of the whole model's.

    `name` and `shape` are the plain model's. Flattened in row-major order, the rank's parameter is its `boxes`,
    each flattened likewise, one after the other: rows of queries, keys and values, say. `primary` is false for a
    copy of what another pipeline or tensor-parallel rank holds too, and answers for; data-parallel copies do not
    count.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    primary: bool = True

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
        """Elements [start, stop) of the rank's flattened parameter as (box, first, last) within each box."""
        offset = 0
        for box in self.boxes:
            first, last = max(start - offset, 0), min(stop - offset, size(box))
            if first < last:
                yield box, first, last
            offset += size(box)


def place(parameter: Any, placement: Placement) -> None:
    """Let a parameter remember where it lies; engines that flatten or partition it keep the object."""
    setattr(parameter, _ATTRIBUTE, placement)


def placement_of(name: str, parameter: Any) -> Placement:
    """Where a module's parameter `name` lies: what was remembered, or all of that parameter of the plain model.

    Under ZeRO-3 the shape of a partitioned parameter is in `ds_shape`.
    """
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return getattr(parameter, _ATTRIBUTE, None) or Placement(name, shape, (whole(shape),))


def secondary(placement: Placement) -> Placement:
    """The same for a copy that another rank answers for."""
    return replace(placement, primary=False)


# The plain model's parameters by name and shape, from its configuration alone (imports no torch).
TABLE, HEAD, POSITIONS = "transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"
"""The token table, the output head where it is not that table, and the table of learned positions."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of `GPT.named_parameters`; a tied head is left out."""
    width, hidden, rows = config.n_embd, config.intermediate_size, config.padded_vocab_size

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        biased = config.norm == "layernorm" and config.bias
        return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if biased else {})}

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if config.bias else {})}

    shapes: dict[str, tuple[int, ...]] = {TABLE: (rows, width)}
    if config.position == "learned":
        shapes[POSITIONS] = (config.block_size, width)
    for layer in range(config.n_layer):
        block = f"transformer.h.{layer}"
        shapes |= norm(f"{block}.ln_1")
        shapes |= linear(f"{block}.attn.c_attn", width, width + 2 * config.kv_width)
        shapes |= linear(f"{block}.attn.c_proj", width, width)
        shapes |= norm(f"{block}.ln_2")
        shapes |= linear(f"{block}.mlp.c_fc", width, hidden)
        if config.mlp == "swiglu":
            shapes |= linear(f"{block}.mlp.c_gate", width, hidden)
        shapes |= linear(f"{block}.mlp.c_proj", hidden, width)
    shapes |= norm("transformer.ln_f")
    if not config.tied:
        shapes[HEAD] = (rows, width)
    return shapes
