"""Index of a checkpoint: the location of each parameter element, and the overlap of slices (imports no torch)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ezpz_llm.core.base import UserError, join_file_name
from ezpz_llm.core.base.records import Bytes, as_plain, as_record
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.checkpoint.manifest import FORMAT, INDEX, damaged_error, read_json
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.model.parameters import Box, size

Part = tuple[Box, int, int]
"""Elements [start, stop) of a box, flattened in row-major order."""


def common(shape: tuple[int, ...], a: Part, b: Part) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements that two parts of a tensor have in common.

    Yields:
        (offset in `a`, offset in `b`, length), in ascending order of both offsets.
    """
    if a[0] == b[0]:
        start, stop = max(a[1], b[1]), min(a[2], b[2])
        if start < stop:
            yield start - a[1], start - b[1], stop - start
        return
    runs_a, runs_b = runs(shape, a), runs(shape, b)
    run_a, run_b = next(runs_a, None), next(runs_b, None)
    while run_a is not None and run_b is not None:
        start = max(run_a[0], run_b[0])
        stop = min(run_a[0] + run_a[2], run_b[0] + run_b[2])
        if start < stop:
            yield run_a[1] + start - run_a[0], run_b[1] + start - run_b[0], stop - start
        if run_a[0] + run_a[2] <= run_b[0] + run_b[2]:
            run_a = next(runs_a, None)
        else:
            run_b = next(runs_b, None)


def runs(shape: tuple[int, ...], part: Part) -> Iterator[tuple[int, int, int]]:
    """Yield a part's runs that are contiguous in the tensor: (offset in the tensor, offset in the part, length)."""
    box, start, stop = part
    # After the last dimension in which the box is a slice, everything is contiguous.
    sliced = max((axis for axis, side in enumerate(box) if side != (0, shape[axis])), default=0)
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    length = (box[sliced][1] - box[sliced][0]) * strides[sliced] if shape else 1
    outer = itertools.product(*(range(*side) for side in box[:sliced]))
    base = box[sliced][0] * strides[sliced] if shape else 0
    for number, indices in enumerate(outer):
        first, last = max(start - number * length, 0), min(stop - number * length, length)
        if first < last:
            offset = base + sum(index * stride for index, stride in zip(indices, strides, strict=False))
            yield offset + first, number * length + first - start, last - first


WEIGHT = "weight"
"""Kind of the fp32 master weight; all other kinds are optimizer state (`ezpz_llm.training.layout.optimizers`)."""
BUFFER = "buffer/"
"""Prefix of buffer names in rank 0's file."""


class Piece(Struct, frozen=True):
    """Elements [start, stop) of a parameter's box, flattened in row-major order, in a file.

    The file has a 1-D tensor `<kind>/<key>` for each kind of the parameter.
    """

    box: tuple[tuple[Bytes, Bytes], ...]
    start: Bytes
    stop: Bytes
    file: str
    key: str


class Parameter(Struct, frozen=True, omit_defaults=True):
    """Parameter of the model: its global shape and its pieces, sorted by box and start.

    `without` has the kinds of other parameters that this one does not have.
    """

    shape: tuple[Bytes, ...]
    pieces: tuple[Piece, ...]
    without: tuple[str, ...] = ()


class Index(Struct, frozen=True):
    """All parameters by name, and the kinds saved for them."""

    kinds: tuple[str, ...]
    parameters: dict[str, Parameter]


def write_index(folder: Path, shapes: dict[str, tuple[int, ...]], kinds: Mapping[str, Sequence[str]],
                pieces: Iterable[tuple[str, Piece]]) -> None:
    """Write the index of (parameter name, piece) pairs.

    Args:
        kinds: the kinds of each parameter.
    """
    all_kinds = tuple(dict.fromkeys(kind for name in shapes for kind in kinds[name]))
    by_name: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, piece in pieces:
        by_name[name].append(piece)
    parameters = {
        name: Parameter(tuple(shapes[name]), tuple(sorted(pieces, key=lambda piece: (piece.box, piece.start))),
                        tuple(kind for kind in all_kinds if kind not in kinds[name]))
        for name, pieces in by_name.items()
    }
    write_json(folder / INDEX, {"format": FORMAT, **as_plain(Index(all_kinds, parameters))})


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises:
        DamagedCheckpointError: the index is missing or invalid, or its format is not the manifest's.
    """
    stored = read_json(folder / INDEX)
    if stored.get("format") != FORMAT:
        raise damaged_error(folder,
                            f"{INDEX} has format {stored.get('format')!r}, the manifest has format {FORMAT}")
    try:
        index = as_record(Index, stored, INDEX)
        for name in {piece.file for parameter in index.parameters.values() for piece in parameter.pieces}:
            join_file_name(folder, name, INDEX)
    except UserError as error:
        raise damaged_error(folder, f"in {INDEX}, {error.found}") from error
    return index


def check_model(index: Index, shapes: dict[str, tuple[int, ...]], folder: Path,
                kinds: Mapping[str, Sequence[str]] | None = None) -> None:
    """Check that a checkpoint has all parameters and the optimizer state of a model.

    Args:
        kinds: required kinds by parameter; None to accept the optimizer state of any supported optimizer.

    Raises:
        UserError: a parameter's name or shape differs, the optimizer state is missing, or the pieces do not cover
            each element exactly once.
    """
    check_shapes(index, shapes, folder)
    if kinds is None and not any({WEIGHT, *row.state} <= set(index.kinds) for row in OPTIMIZERS.values()):
        raise UserError(f"the checkpoint has no optimizer state, only {', '.join(index.kinds)}", where=str(folder),
                        instead="the checkpoint of a training run")
    for name, required in (kinds or {}).items():
        missing = [kind for kind in required if kind not in index.kinds or kind in index.parameters[name].without]
        if missing:
            raise UserError(f"the checkpoint has no optimizer state ({', '.join(missing)}) of {name}",
                            where=str(folder),
                            instead="train the same parameters with the optimizer of the run that saved it")
    check_coverage(index, folder)


def check_coverage(index: Index, folder: Path) -> None:
    """Check that the pieces of each parameter cover each element exactly once.

    Raises:
        UserError: they do not.
    """
    for name, parameter in index.parameters.items():
        if (problem := _coverage_problem(parameter)) is not None:
            raise UserError(f"the checkpoint's index has {problem} in {name}", where=str(folder))


def check_shapes(index: Index, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Compare the names and shapes of a checkpoint's parameters with a model's.

    Raises:
        UserError: they differ; the message names the first difference, with both shapes.
    """
    for name in [*shapes, *index.parameters]:
        stored = index.parameters.get(name)
        if stored is None or name not in shapes or stored.shape != shapes[name]:
            of_model = list(shapes[name]) if name in shapes else "no such parameter"
            of_file = list(stored.shape) if stored is not None else "no such parameter"
            raise UserError(f"the checkpoint is of another model: {name} is {of_file} in the checkpoint, "
                            f"{of_model} in the model", where=str(folder),
                            instead="use the model options of the run that saved it")


def _coverage_problem(parameter: Parameter) -> str | None:
    """Describe the first gap or overlap of a parameter's pieces; return None if they cover each element once."""
    boxes: dict[Box, int] = {}
    for piece in parameter.pieces:  # sorted by box, then by start
        expected = boxes.get(piece.box, 0)
        if piece.start != expected:
            return f"a gap or an overlap at element {expected} of box {list(piece.box)}"
        boxes[piece.box] = piece.stop
    for box, stop in boxes.items():
        if stop != size(box):
            return f"a gap or an overlap at element {stop} of box {list(box)}"
    if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True))
           for box, other in itertools.combinations(boxes, 2)):
        return "boxes that overlap"
    if sum(map(size, boxes)) != math.prod(parameter.shape):
        return "a gap between boxes"
    return None
