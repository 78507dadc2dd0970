"""Functions of whole matrices whose elements are sharded over ranks, for optimizers such as Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.engine.optimizer_state import EngineState, Slice
from ezpz_llm.training.model.parameters import Box

_AT_ONCE = 2 ** 26
"""Approximate number of elements of the matrices that a rank gathers at the same time: 256 MiB."""


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of a box of a matrix, and their place in the flattened tensor that is stepped.

    `is_contributed` is False if another rank contributes the same elements.
    """

    box: Box
    start: int
    stop: int
    place: slice
    is_contributed: bool


@dataclass(frozen=True)
class _Matrix:
    """Shape and local parts of a matrix, and the rank of the group that computes its function."""

    shape: tuple[int, ...]
    parts: list[_Part]
    owner: int


class WholeMatrices:
    """The matrices in the tensors that an optimizer steps, and their distribution over ranks.

    Each matrix has an owner among the ranks with the same pipeline stage, which sends its result to the others. So
    the ranks share the work, and copies of a result are bitwise identical.
    """

    def __init__(self, state: EngineState, mesh: Mesh, names: Collection[str]) -> None:
        """Find the matrices. Collective.

        Args:
            state: the engine's state, of which no part is in files.
            names: the matrices' names in the plain model.
        """
        count = mesh.size("dp", "sp", "tp")
        self._group = mesh.stage_group() if count > 1 else None
        pieces: dict[str, list[Slice]] = {}
        for piece in state.raw_slices():
            pieces.setdefault(piece.name, []).append(piece)
        # With replicated parameters, every rank has its matrices without communication.
        self._is_replicated = any(piece.replicas == count for parts in pieces.values() for piece in parts)
        self._matrices: dict[Tensor, list[_Matrix]] = {}
        work = [0] * count
        for tensor, members in state.stepped():
            for name in members:
                if name not in names:
                    continue
                shape, owner = state.shapes[name], work.index(min(work))
                work[owner] += min(shape) * math.prod(shape)  # FLOPs of a product of the matrix with its transpose
                self._matrices.setdefault(tensor, []).append(
                    _Matrix(shape, list(_parts(tensor, pieces.get(name, []))), owner))

    def apply(self, function: Callable[[Tensor], Tensor], values: Mapping[Tensor, Tensor]) -> None:
        """Replace matrices by a function of each. Collective over the ranks with the same pipeline stage.

        Args:
            function: maps a matrix to a matrix of the same shape.
            values: this rank's elements of the matrices, by the stepped tensor of their parameters, in its shape.
        """
        located = [(matrix, flat.view(-1)) for tensor, flat in values.items() for matrix in self._matrices[tensor]]
        for chunk in _chunks(located):
            wholes = [self._local(matrix, flat) for matrix, flat in chunk]
            matrices = [matrix for matrix, _ in chunk]
            sums = [self._sum_on_owner(matrix, whole) for matrix, whole in zip(matrices, wholes, strict=True)]
            broadcasts = []
            for matrix, whole, reduction in zip(matrices, wholes, sums, strict=True):
                if reduction is not None:
                    reduction.wait()
                if self._group is None or self._group.rank() == matrix.owner:
                    whole.copy_(function(whole))
                if self._group is not None:
                    broadcasts.append(torch.distributed.broadcast(whole, group=self._group, group_src=matrix.owner,
                                                                  async_op=True))
            for broadcast in broadcasts:
                broadcast.wait()
            for (matrix, flat), whole in zip(chunk, wholes, strict=True):
                for part in matrix.parts:
                    flat[part.place] = _box(whole, part).flatten()[part.start:part.stop]

    def _local(self, matrix: _Matrix, flat: Tensor) -> Tensor:
        """Return a matrix with the elements that this rank contributes, and zeros elsewhere."""
        whole = torch.zeros(matrix.shape, dtype=flat.dtype, device=flat.device)
        for part in matrix.parts:
            if part.is_contributed or self._is_replicated:
                box = _box(whole, part)
                elements = box.flatten()  # a part may begin and end inside a row of its box
                elements[part.start:part.stop] = flat[part.place]
                box.copy_(elements.view(box.shape))
        return whole

    def _sum_on_owner(self, matrix: _Matrix, whole: Tensor) -> torch.distributed.Work | None:
        """Start to sum the ranks' elements on the owner."""
        if self._group is None or self._is_replicated:
            return None
        return torch.distributed.reduce(whole, group=self._group, group_dst=matrix.owner, async_op=True)


def _chunks(located: list[tuple[_Matrix, Tensor]]) -> Iterator[list[tuple[_Matrix, Tensor]]]:
    """Yield several matrices at a time, to gather together."""
    chunk: list[tuple[_Matrix, Tensor]] = []
    for entry in located:
        chunk.append(entry)
        if sum(math.prod(matrix.shape) for matrix, _ in chunk) >= _AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _parts(tensor: Tensor, pieces: list[Slice]) -> Iterator[_Part]:
    """Yield the pieces of a parameter that are in a tensor."""
    for piece in pieces:
        weight = piece.tensors["weight"]
        offset = weight.storage_offset() - tensor.storage_offset()
        if weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() \
                and 0 <= offset < tensor.numel():
            yield _Part(piece.box, piece.start, piece.stop, slice(offset, offset + piece.numel),
                        piece.primary and piece.replica == 0)


def _box(whole: Tensor, part: _Part) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in part.box)]
