"""Mesh of ranks: data-, tensor-, pipeline-, and sequence-parallel process groups."""

from __future__ import annotations

import datetime
import math

import torch
from torch.distributed import ProcessGroup

from ezpz_llm.training.dist.degrees import AXES, Axis, Degrees
from ezpz_llm.training.dist.groups import RankGroups

_COMBINED: tuple[tuple[Axis, ...], ...] = (("dp", "sp"), ("pp", "tp"), ("pp", "dp", "sp"))
"""Groups along several axes: ranks that compute with the same parameters, ranks that together hold one copy of the
model, and ranks that differ in their tokens or layers."""


class Mesh:
    """Coordinates and process groups of this rank. Creating a mesh is collective.

    Args:
        control: group for the all-reduce that precedes the creation of a group; see `Dist.control`.
        groups: groups of an earlier mesh in the same world, which are reused.
    """

    def __init__(self, degrees: Degrees, rank: int, timeout: datetime.timedelta | None = None,
                 control: ProcessGroup | None = None, groups: RankGroups | None = None) -> None:
        self.degrees = degrees
        self.rank = rank
        coordinates = degrees.coordinates(rank)
        self.dp_rank, self.tp_rank = coordinates["dp"], coordinates["tp"]
        self.pp_rank, self.sp_rank = coordinates["pp"], coordinates["sp"]
        self.dp_size, self.tp_size, self.pp_size, self.sp_size = degrees.dp, degrees.tp, degrees.pp, degrees.sp
        self.rank_groups = groups or RankGroups(rank, self.size(*AXES), timeout, control)
        self._groups: dict[tuple[Axis, ...], ProcessGroup | None] = {}
        for axes in (*((axis,) for axis in AXES), *_COMBINED):
            key = self._key(axes)
            if key not in self._groups:
                is_trivial = self.size(*key) in (1, self.size(*AXES))
                self._groups[key] = None if is_trivial else self._create(key)

    def group(self, *axes: Axis) -> ProcessGroup | None:
        """Return this rank's group along one axis, or along a combination of axes such as ("dp", "sp").

        None if the group is the whole world or only this rank. torch takes None for the whole world, so check the
        size before communicating.
        """
        return self._groups[self._key(axes)]

    def real_group(self, *axes: Axis) -> ProcessGroup:
        """Return `group`, or, in place of None, the group of the whole world or of this rank only."""
        group = self.group(*axes)
        if group is not None:
            return group
        return torch.distributed.group.WORLD if self.size(*axes) > 1 else self.rank_groups.alone()

    def separate_group(self, *axes: Axis) -> ProcessGroup:
        """Return a group of the same ranks with a separate communicator, for sends and receives. Collective.

        A group created with `device_id` has one NCCL communicator for sends, receives, and collectives, which
        serializes them (github.com/pytorch/pytorch/issues/154132).
        """
        return self._create(axes, "separate")

    def divided(self, size: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Split the world into blocks of `size` adjacent ranks. Collective.

        Returns the group of the ranks that have this rank's position in their blocks, and the group of this rank's
        block. Requires tp = pp = 1.
        """
        world = range(self.size(*AXES))
        across = self.rank_groups.get(lambda rank: list(world[rank % size::size]))
        return across, self.rank_groups.get(lambda rank: list(world[rank - rank % size:][:size]))

    def stage_group(self) -> ProcessGroup:
        """Return the group of the ranks with this rank's pipeline stage, if there are several. Collective."""
        if self.pp_size == 1:
            return torch.distributed.group.WORLD
        return self.rank_groups.get(lambda rank: self.degrees.peers(rank, "dp", "sp", "tp"))

    def end_stages_group(self) -> ProcessGroup:
        """Return the group of the first and last stage of this rank's pipeline. Collective.

        On middle stages, returns the group of the middle stages.
        """
        def ranks_of(rank: int) -> list[int]:
            first, *between, last = self.degrees.peers(rank, "pp")
            return between if rank in between else [first, last]

        return self.real_group("pp") if self.pp_size < 3 else self.rank_groups.get(ranks_of, "end stages")

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks in a group along these axes."""
        return math.prod(getattr(self.degrees, axis) for axis in axes)

    def place(self, *axes: Axis) -> tuple[int, int]:
        """Return this rank's index in its group along these axes, and the size of the group."""
        ranks = self.degrees.peers(self.rank, *axes)
        return ranks.index(self.rank), len(ranks)

    def _key(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return the axes whose degree is above 1. The others do not affect the group."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self.degrees, axis) > 1)

    def _create(self, axes: tuple[Axis, ...], purpose: str = "") -> ProcessGroup:
        return self.rank_groups.get(lambda rank: self.degrees.peers(rank, *axes), purpose)
