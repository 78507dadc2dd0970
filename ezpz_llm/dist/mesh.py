"""How ranks are divided into data-, tensor-, pipeline- and sequence-parallel groups."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

import torch

from ezpz_llm.errors import UserError

Axis = Literal["pp", "dp", "sp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "sp", "tp")
"""From the outermost to the innermost: tensor-parallel peers are neighbours, so that they share a node."""


@dataclass(frozen=True)
class Degrees:
    """The size of each kind of group; their product is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    sp: int = 1

    @classmethod
    def of_world(cls, world_size: int, tp: int = 1, pp: int = 1, sp: int = 1) -> Degrees:
        """The degrees in a world of this size; data parallel is what the others leave.

        Raises:
            UserError: they do not divide the world.
        """
        others = tp * pp * sp
        if others < 1 or world_size % others:
            raise UserError(f"tp {tp} x pp {pp} x sp {sp} = {others} does not divide {world_size} ranks",
                            instead=f"a multiple of {max(others, 1)} ranks")
        return cls(world_size // others, tp, pp, sp)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The place of a rank along each axis."""
        place: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def peers(self, rank: int, axis: Axis) -> list[int]:
        """The ranks that differ from `rank` along `axis` only, in order, `rank` among them."""
        stride = 1
        for inner in reversed(AXES):
            if inner == axis:
                break
            stride *= getattr(self, inner)
        first = rank - self.coordinates(rank)[axis] * stride
        return [first + place * stride for place in range(getattr(self, axis))]


class Mesh:
    """This rank's place and its process groups. Making it is collective."""

    def __init__(self, degrees: Degrees, rank: int, timeout: datetime.timedelta | None = None) -> None:
        self.degrees = degrees
        self.rank = rank
        self._timeout = timeout
        place = degrees.coordinates(rank)
        self.dp_rank, self.tp_rank, self.pp_rank, self.sp_rank = (place[axis] for axis in ("dp", "tp", "pp", "sp"))
        self.dp_size, self.tp_size, self.pp_size, self.sp_size = degrees.dp, degrees.tp, degrees.pp, degrees.sp
        self._groups = {axis: self._make(axis) for axis in AXES}

    def group(self, axis: Axis) -> torch.distributed.ProcessGroup | None:
        """This rank's group along an axis; None where it is the whole world, or this rank alone.

        To torch None is the whole world: look at the size before communicating.
        """
        return self._groups[axis]

    def _make(self, axis: Axis) -> torch.distributed.ProcessGroup | None:
        degrees = self.degrees
        world = degrees.dp * degrees.tp * degrees.pp * degrees.sp
        if getattr(degrees, axis) in (1, world):
            return None
        own = None
        # Every rank has to make every group, in the same order.
        for first in range(world):
            ranks = degrees.peers(first, axis)
            if ranks[0] == first:
                group = torch.distributed.new_group(ranks, timeout=self._timeout)
                own = group if self.rank in ranks else own
        return own
