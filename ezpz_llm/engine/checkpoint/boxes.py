"""What two parts of one tensor have in common, however each was cut (no torch)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ezpz_llm.model.placement import Box

Part = tuple[Box, int, int]
"""Elements [start, stop) of a box that is flattened in row-major order."""


def common(shape: tuple[int, ...], one: Part, other: Part) -> Iterator[tuple[int, int, int]]:
    """The elements that lie in both parts of a tensor of this shape, in runs.

    Yields:
        (offset within the first part, offset within the second, length), both offsets rising.
    """
    if one[0] == other[0]:
        start, stop = max(one[1], other[1]), min(one[2], other[2])
        if start < stop:
            yield start - one[1], start - other[1], stop - start
        return
    ours, theirs = runs(shape, one), runs(shape, other)
    mine, yours = next(ours, None), next(theirs, None)
    while mine is not None and yours is not None:
        start = max(mine[0], yours[0])
        stop = min(mine[0] + mine[2], yours[0] + yours[2])
        if start < stop:
            yield mine[1] + start - mine[0], yours[1] + start - yours[0], stop - start
        if mine[0] + mine[2] <= yours[0] + yours[2]:
            mine = next(ours, None)
        else:
            yours = next(theirs, None)


def runs(shape: tuple[int, ...], part: Part) -> Iterator[tuple[int, int, int]]:
    """A part as runs that are contiguous in the whole tensor: (place in the tensor, offset in the part, length)."""
    box, start, stop = part
    # From the last dimension that the box cuts on, everything is contiguous.
    cut = max((axis for axis, side in enumerate(box) if side != (0, shape[axis])), default=0)
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    length = (box[cut][1] - box[cut][0]) * strides[cut] if shape else 1
    outer = itertools.product(*(range(*side) for side in box[:cut]))
    base = box[cut][0] * strides[cut] if shape else 0
    for number, place in enumerate(outer):
        first, last = max(start - number * length, 0), min(stop - number * length, length)
        if first < last:
            at = base + sum(index * stride for index, stride in zip(place, strides, strict=False))
            yield at + first, number * length + first - start, last - first
