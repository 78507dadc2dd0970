"""Mesh of ranks: their data-, tensor-, pipeline- and sequence-parallel groups."""

from __future__ import annotations

import datetime
import math
from itertools import chain

import torch

from ezpz_llm.dist.degrees import AXES, Axis, Degrees

_COMBINED: tuple[tuple[Axis, ...], ...] = (("dp", "sp"), ("pp", "tp"), ("pp", "dp", "sp"))
"""Groups along several axes: who holds the same parameters; who together holds a whole model, and who sees other
tokens or other layers."""


class Mesh:
    """This rank's place and its process groups. Making it is collective."""

    def __init__(self, degrees: Degrees, rank: int, timeout: datetime.timedelta | None = None) -> None:
        self.degrees = degrees
        self.rank = rank
        self._timeout = timeout
        place = degrees.coordinates(rank)
        self.dp_rank, self.tp_rank, self.pp_rank, self.sp_rank = (place[axis] for axis in ("dp", "tp", "pp", "sp"))
        self.dp_size, self.tp_size, self.pp_size, self.sp_size = degrees.dp, degrees.tp, degrees.pp, degrees.sp
        self._groups: dict[tuple[Axis, ...], torch.distributed.ProcessGroup | None] = {}
        self._alone: torch.distributed.ProcessGroup | None = None
        self._separate: dict[tuple[Axis, ...], torch.distributed.ProcessGroup] = {}
        self._divided: dict[int, tuple[torch.distributed.ProcessGroup, torch.distributed.ProcessGroup]] = {}
        for axes in (*((axis,) for axis in AXES), *_COMBINED):
            key = self._key(axes)
            if key not in self._groups:
                self._groups[key] = None if self.size(*key) in (1, self.size(*AXES)) else self._divide(key)

    def group(self, *axes: Axis) -> torch.distributed.ProcessGroup | None:
        """This rank's group along one axis, or along several that belong together ("dp", "sp").

        None where it is the whole world, or this rank alone. To torch None is the whole world: look at the size
        before communicating.
        """
        return self._groups[self._key(axes)]

    def real_group(self, *axes: Axis) -> torch.distributed.ProcessGroup:
        """The same for libraries that take no None: the world's own group, or one of this rank alone."""
        group = self.group(*axes)
        if group is not None:
            return group
        if self.size(*axes) > 1:
            return torch.distributed.group.WORLD
        if self._alone is None:
            self._alone = torch.distributed.new_group([self.rank], timeout=self._timeout,
                                                      use_local_synchronization=True)
        return self._alone

    def separate_group(self, *axes: Axis) -> torch.distributed.ProcessGroup:
        """A group of the same ranks with a communicator that nothing else uses. Made once, by all ranks together.

        For sends and receives. In a group that was told its device ahead, NCCL has one communicator for these and
        for collectives, and does one after the other (github.com/pytorch/pytorch/issues/154132).
        """
        if axes not in self._separate:
            self._separate[axes] = self._divide(axes)
        return self._separate[axes]

    def divided(self, size: int) -> tuple[torch.distributed.ProcessGroup, torch.distributed.ProcessGroup]:
        """Groups of a world that is data- and sequence-parallel alone: this rank with those that have its number
        among `size` neighbours, and with these neighbours. Made once, by all ranks together."""
        if size not in self._divided:
            world = range(self.size(*AXES))
            across = [list(world[first::size]) for first in range(size)]
            within = [list(world[first:first + size]) for first in world[::size]]
            made = [[torch.distributed.new_group(ranks, timeout=self._timeout) for ranks in kind]
                    for kind in (across, within)]
            self._divided[size] = made[0][self.rank % size], made[1][self.rank // size]
        return self._divided[size]

    def size(self, *axes: Axis) -> int:
        """The number of ranks in such a group."""
        return math.prod(getattr(self.degrees, axis) for axis in axes)

    def place(self, *axes: Axis) -> tuple[int, int]:
        """This rank's number in such a group, and the number of ranks in it."""
        ranks = self.degrees.peers(self.rank, *axes)
        return ranks.index(self.rank), len(ranks)

    def close(self) -> None:
        """Leave the groups, so that another mesh can take this one's place. Collective."""
        made = (*self._groups.values(), *self._separate.values(), *chain(*self._divided.values()), self._alone)
        for group in made:
            if group is not None:
                torch.distributed.destroy_process_group(group)
        self._groups.clear()
        self._separate.clear()
        self._divided.clear()
        self._alone = None

    def _key(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes that count: two groups along axes of which all others have one place are the same."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self.degrees, axis) > 1)

    def _divide(self, axes: tuple[Axis, ...]) -> torch.distributed.ProcessGroup:
        """Divide all ranks into new groups along these axes; this rank's."""
        # Every rank has to make every group, in the same order.
        made = {}
        for first in range(self.size(*AXES)):
            ranks = self.degrees.peers(first, *axes)
            if ranks[0] == first:
                made[first] = torch.distributed.new_group(ranks, timeout=self._timeout)
        return made[self.degrees.peers(self.rank, *axes)[0]]
