"""What one rank holds of the training state, in the terms in which every layout can say it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ezpz_llm.model.parameters import Box, Placement

if TYPE_CHECKING:
    from ezpz_llm.engine.precision import LossScale


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that this rank holds, as live storage.

    Flatten the box of the parameter in row-major order: the slice is its elements [start, stop). `tensors` has one
    1-D fp32 tensor of stop - start elements for each of KINDS. They are views of the engine's own storage, so that
    reading them saves and writing them loads. The same slice is held by `replicas` data-parallel ranks, of which
    this is number `replica`; a slice that is not `primary` is a copy that another rank of the model answers for.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    replica: int = 0
    replicas: int = 1
    primary: bool = True

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def part(self, begin: int, end: int) -> Slice:
        """Elements [begin, end) of this slice."""
        return replace(self, start=self.start + begin, stop=self.start + end,
                       tensors={kind: tensor[begin:end] for kind, tensor in self.tensors.items()})


def cut(at: Placement, start: int, stop: int, tensors: dict[str, torch.Tensor], replica: int = 0,
        replicas: int = 1) -> Iterator[Slice]:
    """The slices that elements [start, stop) of a rank's flattened parameter are.

    Args:
        at: where the parameter lies in the whole model.
        tensors: by kind, the stop - start elements as 1-D views of the engine's storage.
    """
    offset = 0
    for box, first, last in at.pieces(start, stop):
        end = offset + last - first
        part = {kind: tensor[offset:end] for kind, tensor in tensors.items()}
        yield Slice(at.name, at.shape, box, first, last, part, replica, replicas, at.primary)
        offset = end


class EngineState(ABC):
    """The training state of a wrapped engine on this rank. What has a name has the plain model's name for it."""

    shapes: dict[str, tuple[int, ...]]
    """The global shape of every parameter, tied ones once, the same on all ranks."""

    def __init__(self, scale: LossScale | None) -> None:
        self.scale = scale

    @abstractmethod
    def slices(self) -> Iterable[Slice]:
        """Everything this rank holds. Moments that do not exist before the first step are made (zero).

        Asked for between steps. Where state lies in files or has fewer bits than fp32, the tensors of a slice are
        there only until the next one is asked for; what was written to them by then is kept.
        """

    def extents(self) -> Iterable[Slice]:
        """The same slices, without tensors where they would have to be read, nor copies of what has fewer bits."""
        return self.slices()

    @property
    @abstractmethod
    def optimizer_step(self) -> int:
        """The optimizer's own count of the steps it has made, which Adam's bias correction uses."""

    @abstractmethod
    def loaded(self, optimizer_step: int) -> None:
        """Make the rest of the engine follow slices that were just written. Collective: every rank calls it."""


def owned(slices: Iterable[Slice], extents: Iterable[Slice]) -> Iterator[tuple[Slice, Slice | None]]:
    """Each slice with the part of it that this rank answers for, and writes; None where another rank does.

    Every element has one such rank, and all answer for about equally much. Ranks that hold replicas of the same
    slices must list them in the same order. Slices are taken one at a time, as `EngineState.slices` wants it.

    Args:
        slices, extents: of one state; `extents` twice where tensors are not needed.
    """
    extents = list(extents)
    totals: Counter[int] = Counter()
    for piece in extents:
        totals[piece.replicas] += piece.numel * piece.primary
    passed: Counter[int] = Counter()
    for piece in slices:
        if not piece.primary:
            yield piece, None
            continue
        total, offset = totals[piece.replicas], passed[piece.replicas]
        passed[piece.replicas] += piece.numel
        begin = max(total * piece.replica // piece.replicas - offset, 0)
        end = min(total * (piece.replica + 1) // piece.replicas - offset, piece.numel)
        yield piece, piece.part(begin, end) if begin < end else None
