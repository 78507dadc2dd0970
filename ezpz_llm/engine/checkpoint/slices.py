"""What one rank holds of the training state, in the terms in which every layout can say it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ezpz_llm.engine.checkpoint.index import Box

if TYPE_CHECKING:
    from ezpz_llm.engine.precision import LossScale


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that this rank holds, as live storage.

    Flatten the box of the parameter in row-major order: the slice is its elements [start, stop). `tensors` has one
    1-D fp32 tensor of stop - start elements for each of KINDS. They are views of the engine's own storage, so that
    reading them saves and writing them loads. The same slice is held by `replicas` ranks, of which this is number
    `replica`.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    replica: int = 0
    replicas: int = 1

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def part(self, begin: int, end: int) -> Slice:
        """Elements [begin, end) of this slice."""
        return replace(self, start=self.start + begin, stop=self.start + end,
                       tensors={kind: tensor[begin:end] for kind, tensor in self.tensors.items()})


class EngineState(ABC):
    """The training state of a wrapped engine on this rank. What has a name has the plain model's name for it."""

    shapes: dict[str, tuple[int, ...]]
    """The global shape of every parameter, tied ones once, the same on all ranks."""

    def __init__(self, scale: LossScale | None) -> None:
        self.scale = scale

    @abstractmethod
    def slices(self) -> list[Slice]:
        """Everything this rank holds. Moments that do not exist before the first step are made (zero)."""

    @property
    @abstractmethod
    def optimizer_step(self) -> int:
        """The optimizer's own count of the steps it has made, which Adam's bias correction uses."""

    @abstractmethod
    def loaded(self, optimizer_step: int) -> None:
        """Make the rest of the engine follow slices that were just written. Collective: every rank calls it."""


def owned(slices: list[Slice]) -> list[Slice]:
    """The part of `slices` that this rank writes: each element has one writer, and all write about equally much.

    Ranks that hold replicas of the same slices must list them in the same order.
    """
    totals: Counter[int] = Counter()
    for piece in slices:
        totals[piece.replicas] += piece.numel
    passed: Counter[int] = Counter()
    mine = []
    for piece in slices:
        total, offset = totals[piece.replicas], passed[piece.replicas]
        passed[piece.replicas] += piece.numel
        begin = max(total * piece.replica // piece.replicas - offset, 0)
        end = min(total * (piece.replica + 1) // piece.replicas - offset, piece.numel)
        if begin < end:
            mine.append(piece.part(begin, end))
    return mine
