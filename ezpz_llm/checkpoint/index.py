"""Index of a checkpoint: where each element of each parameter lies, and the overlap of two slices (no torch)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import UserError, as_dataclass, file_in
from ezpz_llm.checkpoint.manifest import FORMAT, INDEX, damaged, read_json
from ezpz_llm.layout.optimizers import OPTIMIZERS
from ezpz_llm.model.parameters import Box, size
from ezpz_llm.rundir import write_json

# What two parts of one tensor have in common, however each was cut.
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


WEIGHT = "weight"
"""The kind of the fp32 master weight; the others are the optimizer's state (see `ezpz_llm.layout.optimizers`)."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter's box, flattened in row-major order, in a file.

    In the file they are the 1-D tensors `<kind>/<key>`, one for each kind.
    """

    box: Box
    start: int
    stop: int
    file: str
    key: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its global shape and the pieces that make it up, by start."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """All parameters by name, and the kinds that were saved of each."""

    kinds: tuple[str, ...]
    parameters: dict[str, Parameter]


def write_index(folder: Path, shapes: dict[str, tuple[int, ...]], kinds: Sequence[str],
                pieces: Iterable[tuple[str, Piece]]) -> None:
    """Write the index of (name, piece) pairs."""
    by_name: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, piece in pieces:
        by_name[name].append(piece)
    parameters = {
        name: {"shape": shapes[name],
               "pieces": [vars(piece) for piece in sorted(found, key=lambda piece: (piece.box, piece.start))]}
        for name, found in by_name.items()
    }
    write_json(folder / INDEX, {"format": FORMAT, "kinds": kinds, "parameters": parameters})


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises:
        Damaged: it is of another format than the manifest, or no JSON object.
    """
    stored = read_json(folder / INDEX)
    if stored.get("format") != FORMAT:
        raise damaged(folder, f"{INDEX} is of format {stored.get('format')!r}, the manifest of format {FORMAT}")
    try:
        index = as_dataclass(Index, {name: value for name, value in stored.items() if name != "format"}, INDEX)
        for name in {piece.file for parameter in index.parameters.values() for piece in parameter.pieces}:
            file_in(folder, name, INDEX)
    except UserError as error:
        raise damaged(folder, f"in {INDEX}, {error.found}") from error
    return index


def check_model(index: Index, shapes: dict[str, tuple[int, ...]], folder: Path,
                kinds: Sequence[str] | None = None) -> None:
    """Compare a checkpoint with the parameters of a model.

    Args:
        kinds: what has to be there of each parameter; None for the state of any optimizer of the table.

    Raises:
        UserError: they differ; names the first parameter that does, with both shapes. Or the checkpoint has no
            optimizer state, or its pieces do not make up whole parameters.
    """
    check_shapes(index, shapes, folder)
    wanted = [(WEIGHT, *row.state) for row in OPTIMIZERS.values()] if kinds is None else [kinds]
    missing = min(([kind for kind in one if kind not in index.kinds] for one in wanted), key=len)
    if missing:
        raise UserError(f"the checkpoint has no optimizer state ({', '.join(missing)}), so training cannot go on "
                        "from it", where=str(folder), instead="resume from a checkpoint that a training run saved")
    for name, parameter in index.parameters.items():
        if (problem := _incomplete(parameter)) is not None:
            raise UserError(f"the checkpoint's index has {problem} in {name}", where=str(folder))


def check_shapes(index: Index, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Compare a checkpoint's parameters with a model's, name to shape.

    Raises:
        UserError: names the first that differs, with both shapes.
    """
    for name in [*shapes, *index.parameters]:
        stored = index.parameters.get(name)
        if stored is None or name not in shapes or stored.shape != shapes[name]:
            of_model = list(shapes[name]) if name in shapes else "no such parameter"
            of_file = list(stored.shape) if stored is not None else "no such parameter"
            raise UserError(f"the checkpoint is of another model: {name} is {of_file} in the checkpoint, "
                            f"{of_model} in the model", where=str(folder),
                            instead="give the same model options as the run that saved it")


def _incomplete(parameter: Parameter) -> str | None:
    """Return why the pieces do not cover each element of the parameter once; None if they do."""
    boxes: dict[Box, int] = {}
    for piece in parameter.pieces:  # sorted by box, then by start
        at = boxes.get(piece.box, 0)
        if piece.start != at:
            return f"a gap or an overlap at element {at} of box {list(piece.box)}"
        boxes[piece.box] = piece.stop
    for box, stop in boxes.items():
        if stop != size(box):
            return f"a gap or an overlap at element {stop} of box {list(box)}"
    if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
           for one, other in itertools.combinations(boxes, 2)):
        return "boxes that overlap"
    if sum(map(size, boxes)) != math.prod(parameter.shape):
        return "a gap between boxes"
    return None
