"""Degrees of parallelism, and a rank's coordinates among them (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ezpz_llm.base import UserError

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

    def peers(self, rank: int, *axes: Axis) -> list[int]:
        """The ranks that differ from `rank` along these axes only, in order, `rank` among them."""
        ranks, stride = [0], 1
        place = self.coordinates(rank)
        for axis in reversed(AXES):
            places = range(getattr(self, axis)) if axis in axes else (place[axis],)
            ranks = [first + here * stride for here in places for first in ranks]
            stride *= getattr(self, axis)
        return ranks
