"""Functions of whole matrices whose elements are sharded over ranks, for optimizers such as Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.engine.optimizer_state import EngineState, Slice
from ezpz_llm.model.parameters import Box

_AT_ONCE = 2 ** 26
"""Approximate number of elements of the matrices that a rank gathers at the same time: 256 MiB."""


@dataclass(frozen=True)
class _Part:
    """Part of a matrix in a stepped tensor: elements [start, stop) of a box, from an offset of the flat tensor."""

    box: Box
    start: int
    stop: int
    offset: int
    is_contributed: bool


@dataclass(frozen=True)
class _Matrix:
    shape: tuple[int, ...]
    parts: list[_Part]


class WholeMatrices:
    """The matrices in the tensors that an optimizer steps, and their distribution over ranks.

    Each matrix is computed by one of the ranks with the same pipeline stage, in turn, and sent to the others.
    So the ranks share the work, and copies of a result are bitwise identical.
    """

    def __init__(self, state: EngineState, mesh: Mesh) -> None:
        """Find the matrices. Collective.

        Args:
            state: the engine's state, of which no part is in files.
        """
        self._count = mesh.size("dp", "sp", "tp")
        self._group = mesh.stage_group() if self._count > 1 else None
        pieces: dict[str, list[Slice]] = {}
        for piece in state.raw_slices():
            pieces.setdefault(piece.name, []).append(piece)
        # With replicated parameters, every rank has its matrices without communication.
        self._is_replicated = any(piece.replicas == self._count for parts in pieces.values() for piece in parts)
        self._matrices = {tensor: [_Matrix(state.shapes[name], list(_parts(tensor, pieces.get(name, []))))
                                   for name in names] for tensor, names in state.stepped()}

    def transformed(self, tensor: Tensor, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function to whole matrices. Collective over the ranks with the same pipeline stage.

        Args:
            tensor: a stepped tensor with only matrices.
            values: values for its elements, in its shape.
            function: maps a matrix to a matrix of the same shape.

        Returns:
            This rank's elements of the results, in the shape of the tensor; 0 for padding.
        """
        result = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        given, flat = values.reshape(-1), result.view(-1)
        for numbered in self._chunks(self._matrices[tensor]):
            wholes = [self._gather(number, matrix, given) for number, matrix in numbered]
            work = []
            for (number, _), (whole, reduction) in zip(numbered, wholes, strict=True):
                if reduction is not None:
                    reduction.wait()
                owner = number % self._count
                if self._group is None:
                    whole.copy_(function(whole))
                    continue
                if self._group.rank() == owner:
                    whole.copy_(function(whole))
                work.append(torch.distributed.broadcast(whole, group=self._group, group_src=owner, async_op=True))
            for broadcast in work:
                broadcast.wait()
            for (_, matrix), (whole, _) in zip(numbered, wholes, strict=True):
                for part in matrix.parts:
                    flat[part.offset:part.offset + part.stop - part.start] = \
                        _box(whole, part).reshape(-1)[part.start:part.stop]
        return result

    def _chunks(self, matrices: list[_Matrix]) -> Iterator[list[tuple[int, _Matrix]]]:
        """Yield matrices with their numbers, several at a time."""
        chunk: list[tuple[int, _Matrix]] = []
        elements = 0
        for number, matrix in enumerate(matrices):
            chunk.append((number, matrix))
            elements += math.prod(matrix.shape)
            if elements >= _AT_ONCE:
                yield chunk
                chunk, elements = [], 0
        if chunk:
            yield chunk

    def _gather(self, number: int, matrix: _Matrix,
                given: Tensor) -> tuple[Tensor, torch.distributed.Work | None]:
        """Start to sum the ranks' parts of a matrix, with zeros elsewhere, on the rank that computes it."""
        whole = torch.zeros(matrix.shape, dtype=given.dtype, device=given.device)
        for part in matrix.parts:
            if part.is_contributed or self._is_replicated:
                _write(whole, part, given[part.offset:part.offset + part.stop - part.start])
        if self._group is None or self._is_replicated:
            return whole, None
        return whole, torch.distributed.reduce(whole, group=self._group, group_dst=number % self._count,
                                               async_op=True)


def _parts(tensor: Tensor, pieces: list[Slice]) -> Iterator[_Part]:
    """Yield the pieces of a parameter that are in a tensor."""
    for piece in pieces:
        weight = piece.tensors["weight"]
        offset = weight.storage_offset() - tensor.storage_offset()
        if weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() \
                and 0 <= offset < tensor.numel():
            yield _Part(piece.box, piece.start, piece.stop, offset, piece.primary and piece.replica == 0)


def _box(whole: Tensor, part: _Part) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in part.box)]


def _write(whole: Tensor, part: _Part, values: Tensor) -> None:
    """Write the elements of a part, which may begin and end inside a row of its box."""
    box = _box(whole, part)
    if box.numel() == part.stop - part.start:
        box.copy_(values.view(box.shape))
        return
    flat = box.reshape(-1).clone()
    flat[part.start:part.stop] = values
    box.copy_(flat.view(box.shape))
