"""What a step's time is made of as a run grows: the terms of the law that is fitted (no torch).

With q tokens of a step on each rank, in `a` micro-steps, over d data-parallel ranks in p pipeline stages:

    t = work q + bubble + serial + divided / d + bandwidth r (d - 1) / d + latency r f(n)

- *work* grows with the tokens of a rank: what is divided as ranks are added to a fixed batch, and constant where
  the batch grows with them. Tensor- and sequence-parallel traffic grows with tokens too, and is part of it.
- *bubble* is what a pipeline adds to the work, work q (p - 1) / a: no term of its own (Huang et al. 2019).
- *serial* is the same at any size.
- *divided* is the optimizer's work where its state is divided over ranks (ZeRO, FSDP): it falls as they grow more.
- *bandwidth*: a ring sends (d - 1) / d of the data over each link, twice in an all-reduce (Patarasso, Yuan 2009).
- *latency* grows with the number of nodes (or ranks) as f(n) = log2 n in a tree, or n - 1 in a ring.

r is the number of rounds a step: gradients go round once a step where they are whole on each rank, once a
micro-step where they are not (ZeRO-2 and 3, FSDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.rundir import RunDir, read_layout
from ezpz_llm.scaling.efficiency import Curve, Measured


@dataclass(frozen=True)
class Shape:
    """What the law asks of a layout: pipeline stages; whether gradients go round once a micro-step; whether the
    optimizer's state is divided over data-parallel ranks."""

    pp: int = 1
    per_micro_step: bool = False
    divides: bool = False


def shape_of(run_dir: Path) -> Shape | None:
    """The shape of a run's layout, as its layout.json has it; None where there is none."""
    resolved = read_layout(RunDir(run_dir).layout)
    if resolved is None:
        return None
    layout = resolved["layout"]
    stage = layout.get("zero_stage") or 0
    sharded = layout.get("engine") == "fsdp2"
    return Shape(layout.get("pp", 1), stage >= 2 or sharded, stage >= 1 or sharded)


@dataclass(frozen=True)
class Setting:
    """A measured or imagined point: its size in nodes or ranks, d data-parallel ranks, q tokens of a step on each
    rank, `a` micro-steps (not always a whole number: lines are drawn between points). `alone`: nothing leaves the
    node, and what goes round within it is the same at any size."""

    size: float
    dp: float
    tokens: float
    accumulation: float
    alone: bool
    shape: Shape

    @property
    def rounds(self) -> float:
        return self.accumulation if self.shape.per_micro_step else 1.0

    @property
    def bubble(self) -> float:
        """The idle time of a pipeline over its work."""
        return (self.shape.pp - 1) / self.accumulation


def setting_of(curve: Curve, point: Measured, shape: Shape) -> Setting:
    """What the law sees of a measured point."""
    one = point.first
    alone = curve.unit == "nodes" and point.nodes == 1
    return Setting(curve.size(point), one.global_batch / (one.micro_batch * one.accumulation),
                   one.step_tokens / point.ranks, one.accumulation, alone, shape)


def setting_at(curve: Curve, size: float, shape: Shape) -> Setting:
    """What the law sees of the curve at another size: a fixed batch per device, or a fixed global batch."""
    base = setting_of(curve, curve.base, shape)
    grown = size / base.size
    divided = grown if curve.mode == "strong" else 1.0
    return replace(base, size=size, dp=base.dp * grown, tokens=base.tokens / divided,
                   accumulation=max(1.0, base.accumulation / divided), alone=curve.unit == "nodes" and size <= 1)


def check_divides(curve: Curve, size: int) -> None:
    """Refuse a size at which the curve could not be measured.

    Raises:
        UserError: the fixed global batch cannot be divided there.
    """
    if curve.mode == "weak":
        return
    one = curve.base.first
    micro_batches = {point.first.micro_batch for point in curve.points}
    # Where they differ, the trainer was free to choose them.
    least = micro_batches.pop() if len(micro_batches) == 1 else 1
    dp = one.global_batch / (one.micro_batch * one.accumulation) * size / curve.size(curve.base)
    if dp != int(dp) or one.global_batch % (least * int(dp)):
        raise UserError(f"a global batch of {one.global_batch} in micro batches of {least} cannot be divided "
                        f"over {dp:g} data-parallel ranks", where=f"{curve.name} at {size} {curve.unit}",
                        instead="a size that divides it, or a study with another batch")


Term = Callable[[Setting], float]

TERMS: dict[str, Term] = {
    "work": lambda at: at.tokens * (1 + at.bubble),
    "serial": lambda at: 1.0,
    "divided": lambda at: 1 / at.dp if at.shape.divides else 0.0,
    "bandwidth": lambda at: 0.0 if at.alone else at.rounds * (at.dp - 1) / at.dp,
    "latency, tree": lambda at: at.rounds * math.log2(at.size),
    "latency, ring": lambda at: at.rounds * (at.size - 1),
}
"""By name; at most one of the two latencies is in a law."""
