"""Where each rank runs. A table of 100,000 ranks is looked up, not written out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from ezpz_llm.launch.binding import Binding
from ezpz_llm.launch.placement import Placement


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs: the cores that it may run on, their NUMA domains, the accelerator that it takes, and how
    far that is from the cores; None where they cannot be told from here."""

    rank: int
    host: str
    local_rank: int
    cores: str | None = None
    domains: str | None = None
    device: str | None = None
    distance: str | None = None


class RankTable(Sequence[RankPlace]):
    """All ranks in order, made from the placement and the binding of one host."""

    def __init__(self, placement: Placement, binding: Binding) -> None:
        self._hosts = [name for name, _ in placement.ranks]
        self._ends = list(accumulate(count for _, count in placement.ranks))
        columns = (binding.cores, binding.domains, binding.devices, binding.distances)
        self._of_local_rank = [tuple(column[local_rank] if column else None for column in columns)
                               for local_rank in range(placement.most)]

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> RankPlace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankPlace, ...]: ...

    def __getitem__(self, index: int | slice) -> RankPlace | tuple[RankPlace, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        rank = index % len(self)
        host = bisect_right(self._ends, rank)
        return self._place(rank, self._hosts[host], rank - (self._ends[host - 1] if host else 0))

    def __iter__(self) -> Iterator[RankPlace]:
        rank = 0
        for host, end in zip(self._hosts, self._ends, strict=True):
            first = rank
            for rank in range(first, end):
                yield self._place(rank, host, rank - first)
            rank = end

    def _place(self, rank: int, host: str, local_rank: int) -> RankPlace:
        return RankPlace(rank, host, local_rank, *self._of_local_rank[local_rank])
