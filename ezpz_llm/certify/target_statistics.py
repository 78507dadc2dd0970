"""Norms that take statistics of the batch (BatchNorm), in one process that stands for several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ezpz_llm.engine.running_statistics import statistics_of

_OF_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalises_over_the_batch(module: nn.Module) -> bool:
    """True if what it gives of a sample depends on the others of the batch: a rank's part is then not the whole."""
    return any(isinstance(part, _OF_THE_BATCH) for part in module.modules())


class StatisticsByPlace:
    """Running statistics of the places of ranks: during a step each has its own, after it all have their mean.

    So `ezpz_llm.wrap` has them over ranks. Where there is one place, nothing is done.

    Args:
        module: in training mode, with the statistics that all places begin with.
        places: of the ranks that one process stands for.
    """

    def __init__(self, module: nn.Module, places: Sequence[int]) -> None:
        self._live = list(statistics_of(module).values())
        self._held = {place: [one.clone() for one in self._live] for place in places} if len(places) > 1 else {}

    @contextmanager
    def of(self, place: int) -> Iterator[None]:
        """Compute with those of a place."""
        held = self._held.get(place, [])
        _copy(held, self._live)
        yield
        _copy(self._live, held)

    def average(self) -> None:
        """Give all places the mean."""
        if self._held:
            for live, *held in zip(self._live, *self._held.values(), strict=True):
                mean = torch.stack(held).mean(0)
                _copy([mean] * (1 + len(held)), [live, *held])


def _copy(those: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(those, to, strict=False):  # none are held where there is one place
            other.copy_(one)
