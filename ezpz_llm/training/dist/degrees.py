"""Degrees of parallelism and the coordinates of a rank (does not import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ezpz_llm.core.base import UserError, count_noun

Axis = Literal["pp", "dp", "sp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "sp", "tp")
"""Axes from outermost to innermost. Tensor-parallel peers have adjacent ranks, so that they share a node."""


@dataclass(frozen=True)
class Degrees:
    """Size of the groups along each axis. The product is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    sp: int = 1

    @classmethod
    def of_world(cls, world_size: int, tp: int = 1, pp: int = 1, sp: int = 1) -> Degrees:
        """Return the degrees for a world size, with dp = world size / (tp x pp x sp).

        Raises:
            UserError: tp x pp x sp does not divide the world size.
        """
        product = tp * pp * sp
        if product < 1 or world_size % product:
            raise UserError(f"tp {tp} x pp {pp} x sp {sp} = {product} does not divide "
                            f"{count_noun(world_size, 'rank')}",
                            instead=f"a multiple of {count_noun(max(product, 1), 'rank')}")
        return cls(world_size // product, tp, pp, sp)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of a rank along each axis."""
        coordinates: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def peers(self, rank: int, *axes: Axis) -> list[int]:
        """Return `rank` and the ranks that differ from it along these axes only, in ascending order."""
        ranks, stride = [0], 1
        own = self.coordinates(rank)
        for axis in reversed(AXES):
            coordinates = range(getattr(self, axis)) if axis in axes else (own[axis],)
            ranks = [inner + coordinate * stride for coordinate in coordinates for inner in ranks]
            stride *= getattr(self, axis)
        return ranks
