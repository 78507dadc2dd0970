"""How a model is spread over ranks, as a value (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ezpz_llm.errors import UserError

DEGREES = ("tp", "pp", "sp")
DEGREE_NAMES = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "sp": "sequence-parallel"}


@dataclass(frozen=True)
class Layout:
    """One parallel layout.

    `zero_stage` is None where DeepSpeed is not used; `offload_optimizer` is "cpu" where the optimizer's state and
    its step live in host memory, else None. Degrees multiply with the data-parallel size to the number of ranks.
    """

    name: str
    engine: Literal["torch", "deepspeed"]
    zero_stage: int | None = None
    tp: int = 1
    pp: int = 1
    sp: int = 1
    offload_optimizer: str | None = None

    def dp_size(self, world_size: int) -> int:
        """The number of ranks that each see their own samples.

        Raises:
            UserError: the degrees do not divide the number of ranks.
        """
        others = self.tp * self.pp * self.sp
        if world_size % others:
            raise UserError(f"{world_size} ranks cannot be divided into groups of tp {self.tp} x pp {self.pp} x "
                            f"sp {self.sp} = {others}", where=f"layout {self.name}",
                            instead=f"{world_size - world_size % others or others} ranks")
        return world_size // others
