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
