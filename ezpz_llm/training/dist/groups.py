"""Process groups that partition the world, created once and reused."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup, new_group

from ezpz_llm.training.dist.torch_internals import count_groups

Division = Callable[[int], list[int]]
"""Maps each rank to the ranks of its group, sorted. Every rank is in exactly one group."""


class RankGroups:
    """This rank's groups, which exist until the default process group is destroyed.

    They are not destroyed earlier: torch derives a group's name from its ranks and the number of existing groups,
    so a later group of the same ranks could get the name, and the store's keys, of a destroyed one.
    """

    def __init__(self, rank: int, world_size: int, timeout: datetime.timedelta | None,
                 control: ProcessGroup | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._control = control
        self._groups: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}

    def get(self, division: Division, purpose: str = "") -> ProcessGroup:
        """Return this rank's group of a division, with a separate communicator per purpose. Collective.

        Each rank creates only its own group, so the number of calls does not depend on the world size. With NCCL,
        the ranks' calls are a single split of the world's communicator. Ranks that have different numbers of groups
        create every group of the division.
        """
        ranks = division(self._rank)
        key = tuple(ranks), purpose
        if key not in self._groups:
            self._groups[key] = self._create(ranks) if self._has_equal_counts() else self._create_all(division)
        return self._groups[key]

    def alone(self) -> ProcessGroup:
        """Return the group of this rank only."""
        key = (self._rank,), "alone"
        if key not in self._groups:
            self._groups[key] = self._create([self._rank])
        return self._groups[key]

    def _create(self, ranks: list[int]) -> ProcessGroup:
        return new_group(ranks, timeout=self._timeout, use_local_synchronization=True)

    def _has_equal_counts(self) -> bool:
        """Return True if all ranks have the same number of groups, on which a new group's name depends. Collective.

        The numbers differ if a program has created groups that do not include all ranks.
        """
        count = count_groups()
        extremes = torch.tensor([count, -count])
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=self._control)
        highest, negated_lowest = extremes.tolist()
        return highest == -negated_lowest

    def _create_all(self, division: Division) -> ProcessGroup:
        """Create every group of a division on every rank, so that no name depends on a rank's other groups."""
        groups = {}
        for first in range(self._world_size):
            ranks = division(first)
            if ranks[0] == first:
                groups[first] = new_group(ranks, timeout=self._timeout)
        return groups[division(self._rank)[0]]
