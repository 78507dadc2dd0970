"""Batch statistics (BatchNorm) in a single process that emulates several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ezpz_llm.training.engine.running_statistics import statistics_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalizes_over_batch(module: nn.Module) -> bool:
    """Return True if a module uses batch statistics, so that its output depends on the split of a batch."""
    return any(isinstance(part, _BATCH_NORMS) for part in module.modules())


class StatisticsByRank:
    """Running statistics of each emulated rank: separate during a step, averaged after it.

    `ezpz_llm.wrap` averages the statistics of real ranks in the same way. With a single rank, this does nothing.

    Args:
        module: module in training mode, with the initial statistics of all ranks.
        places: the emulated data-parallel ranks.
    """

    def __init__(self, module: nn.Module, dp_ranks: Sequence[int]) -> None:
        self._live = list(statistics_of(module).values())
        self._sets = ({dp_rank: [value.clone() for value in self._live] for dp_rank in dp_ranks}
                      if len(dp_ranks) > 1 else {})

    @contextmanager
    def of(self, dp_rank: int) -> Iterator[None]:
        """Use the statistics of one emulated rank in the module, and save them afterwards."""
        saved = self._sets.get(dp_rank, [])
        _copy(saved, self._live)
        yield
        _copy(self._live, saved)

    def average(self) -> None:
        """Set the statistics of all ranks to their mean."""
        if self._sets:
            for live, *copies in zip(self._live, *self._sets.values(), strict=True):
                mean = torch.stack(copies).mean(0)
                _copy([mean] * (1 + len(copies)), [live, *copies])


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=False):  # with a single rank, one list is empty
            target.copy_(source)
