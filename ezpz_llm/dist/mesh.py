"""Mesh of ranks: their data-, tensor-, pipeline- and sequence-parallel groups."""

from __future__ import annotations

import datetime
import math

import torch
from torch.distributed import ProcessGroup

from ezpz_llm.dist.degrees import AXES, Axis, Degrees
from ezpz_llm.dist.groups import RankGroups

_CPU = torch.device("cpu")

_COMBINED: tuple[tuple[Axis, ...], ...] = (("dp", "sp"), ("pp", "tp"), ("pp", "dp", "sp"))
"""Groups along several axes: who holds the same parameters; who together holds a whole model, and who sees other
tokens or other layers."""


class Mesh:
    """This rank's coordinates and process groups. Creating it is collective.

    Args:
        device: of this rank, for a collective that precedes the creation of groups.
        groups: of an earlier mesh in the same world, to be reused.
    """

    def __init__(self, degrees: Degrees, rank: int, timeout: datetime.timedelta | None = None,
                 device: torch.device = _CPU, groups: RankGroups | None = None) -> None:
        self.degrees = degrees
        self.rank = rank
        place = degrees.coordinates(rank)
        self.dp_rank, self.tp_rank, self.pp_rank, self.sp_rank = (place[axis] for axis in ("dp", "tp", "pp", "sp"))
        self.dp_size, self.tp_size, self.pp_size, self.sp_size = degrees.dp, degrees.tp, degrees.pp, degrees.sp
        self.rank_groups = groups or RankGroups(rank, self.size(*AXES), device, timeout)
        self._groups: dict[tuple[Axis, ...], ProcessGroup | None] = {}
        for axes in (*((axis,) for axis in AXES), *_COMBINED):
            key = self._key(axes)
            if key not in self._groups:
                is_trivial = self.size(*key) in (1, self.size(*AXES))
                self._groups[key] = None if is_trivial else self._create(key)

    def group(self, *axes: Axis) -> ProcessGroup | None:
        """This rank's group along one axis, or along several that belong together ("dp", "sp").

        None where it is the whole world, or this rank alone. To torch None is the whole world: look at the size
        before communicating.
        """
        return self._groups[self._key(axes)]

    def real_group(self, *axes: Axis) -> ProcessGroup:
        """The same for libraries that take no None: the world's own group, or one of this rank alone."""
        group = self.group(*axes)
        if group is not None:
            return group
        return torch.distributed.group.WORLD if self.size(*axes) > 1 else self.rank_groups.alone()

    def separate_group(self, *axes: Axis) -> ProcessGroup:
        """A group of the same ranks with a communicator that nothing else uses. Collective.

        For sends and receives. In a group that was told its device ahead, NCCL has one communicator for these and
        for collectives, and does one after the other (github.com/pytorch/pytorch/issues/154132).
        """
        return self._create(axes, "separate")

    def divided(self, size: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Groups of a world that is data- and sequence-parallel alone: this rank with those that have its number
        among `size` neighbors, and with these neighbors. Collective."""
        world = range(self.size(*AXES))
        across = self.rank_groups.get(lambda rank: list(world[rank % size::size]))
        return across, self.rank_groups.get(lambda rank: list(world[rank - rank % size:][:size]))

    def end_stages_group(self) -> ProcessGroup:
        """The first and the last stage of this rank's pipeline; on other stages, those between. Collective."""
        def ranks_of(rank: int) -> list[int]:
            first, *between, last = self.degrees.peers(rank, "pp")
            return between if rank in between else [first, last]

        return self.real_group("pp") if self.pp_size < 3 else self.rank_groups.get(ranks_of, "end stages")

    def size(self, *axes: Axis) -> int:
        """The number of ranks in such a group."""
        return math.prod(getattr(self.degrees, axis) for axis in axes)

    def place(self, *axes: Axis) -> tuple[int, int]:
        """This rank's number in such a group, and the number of ranks in it."""
        ranks = self.degrees.peers(self.rank, *axes)
        return ranks.index(self.rank), len(ranks)

    def _key(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes that count: two groups along axes of which all others have one place are the same."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self.degrees, axis) > 1)

    def _create(self, axes: tuple[Axis, ...], purpose: str = "") -> ProcessGroup:
        return self.rank_groups.get(lambda rank: self.degrees.peers(rank, *axes), purpose)
