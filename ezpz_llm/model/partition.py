"""Partition of a model's blocks into pipeline stages (imports no torch).

Symbols: C_q width of all queries, L layers, T context, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ezpz_llm.base import UserError
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import AFTER, BEFORE, BLOCK, count

Partition = Literal["parameters", "time"]


@dataclass(frozen=True)
class Weights:
    """What a stage's parts cost: one block, what the first stage has besides (embedding), and the last (head)."""

    block: float
    first: float
    last: float


def part_weights(config: ModelConfig, by: Partition) -> Weights:
    """The cost of a model's parts, in parameters or in floating-point operations of a token's forward pass.

    "time" counts matrix products, two operations a parameter, and the 4 C_q T of attention's scores and values over
    the whole context; the backward pass costs twice that everywhere. Looking an embedding up costs nothing. Blocks
    with equal numbers take equally long on any device, so only the head's share depends on this model of time.
    """
    block = count(config, BLOCK)
    table = config.padded_vocab_size * config.n_embd
    if by == "time":
        return Weights(2 * block + 4 * config.q_width * config.block_size, 0, 2 * table)
    # The last stage holds a table also where it is tied.
    return Weights(block, count(config, BEFORE), count(config, AFTER) + (table if config.tied else 0))


def stage_bounds(config: ModelConfig, stages: int, by: Partition) -> tuple[int, ...]:
    """Stage s computes blocks bounds[s] up to bounds[s + 1]; each has at least one, and the heaviest is lightest.

    Every stage having a block, it also has both kinds of parameters that weight decay tells apart, and so takes
    part in each of the reductions that an optimizer makes once a kind.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    if stages > config.n_layer:
        raise UserError(f"{config.n_layer} blocks cannot be divided among {stages} pipeline stages", where="pp",
                        instead=f"--pp {config.n_layer} or less, or --n-layer {stages}")
    return balance(config.n_layer, stages, part_weights(config, by))


def balance(blocks: int, stages: int, weights: Weights) -> tuple[int, ...]:
    """Bounds of `stages` contiguous, non-empty parts of `blocks` equal blocks.

    The largest load is minimal; among those divisions the sum of squared loads is, which evens out the rest; among
    those the early stages have fewer blocks.
    """
    def load(stage: int, count: int) -> float:
        return count * weights.block + weights.first * (stage == 0) + weights.last * (stage == stages - 1)

    limit = _best(blocks, stages, lambda so_far, stage, count: max(so_far, load(stage, count)))[0]

    def squares(so_far: float, stage: int, count: int) -> float:
        return so_far + load(stage, count) ** 2 if load(stage, count) <= limit else math.inf

    return _best(blocks, stages, squares)[1]


def _best(blocks: int, stages: int,
          extend: Callable[[float, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The least cost of a division and its bounds; `extend` adds a stage with so many blocks to a cost."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by blocks divided among the stages so far
    for stage in range(stages):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for done, (cost, bounds) in best.items():
            for stop in range(done + 1, blocks - (stages - stage - 1) + 1):
                candidate = (extend(cost, stage, stop - done), (*bounds, stop))
                found[stop] = min(candidate, found.get(stop, candidate))
        best = found
    return best[blocks]
