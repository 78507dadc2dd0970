"""Partition of a model's blocks into pipeline stages (imports no torch).

Symbols: C_q is the total width of all queries, T the context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ezpz_llm.core.base import UserError
from ezpz_llm.training.model.config import AFTER, BEFORE, BLOCK, ModelConfig
from ezpz_llm.training.model.parameters import count

Partition = Literal["parameters", "time"]


@dataclass(frozen=True)
class Weights:
    """Costs of a block, of the first stage's embedding, and of the last stage's head."""

    block: float
    first: float
    last: float


def part_weights(config: ModelConfig, by: Partition) -> Weights:
    """Return the costs of a model's parts, in parameters or in FLOPs of a token's forward pass.

    "time" counts matmuls: 2 FLOPs per parameter, and 4 C_q T for attention over the whole context. The backward
    pass costs twice as much in every part, and an embedding lookup costs nothing. All blocks take equally long on
    any device, so only the head's share depends on this estimate.
    """
    block = count(config, BLOCK)
    table = config.padded_vocab_size * config.n_embd
    if by == "time":
        return Weights(2 * block + 4 * config.q_width * config.block_size, 0, 2 * table)
    # The last stage has a copy of a tied embedding.
    return Weights(block, count(config, BEFORE), count(config, AFTER) + (table if config.tied else 0))


def stage_bounds(config: ModelConfig, stages: int, by: Partition) -> tuple[int, ...]:
    """Return the bounds of stages: stage s computes blocks [bounds[s], bounds[s + 1]).

    Each stage has at least one block, and the largest load is minimal. Because every stage has a block, it has
    parameters of both decay groups, and so participates in the optimizer's reductions, which run once per group.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    if stages > config.n_layer:
        raise UserError(f"{config.n_layer} blocks cannot be divided among {stages} pipeline stages", where="pp",
                        instead=f"use --pp {config.n_layer} or less, or --n-layer {stages}")
    return balance(config.n_layer, stages, part_weights(config, by))


def balance(blocks: int, stages: int, weights: Weights) -> tuple[int, ...]:
    """Return the bounds of `stages` contiguous, non-empty parts of `blocks` equal blocks.

    Minimizes the largest load, then the sum of squared loads (which balances the other stages), then the number of
    blocks in early stages.
    """
    def load(stage: int, count: int) -> float:
        return count * weights.block + weights.first * (stage == 0) + weights.last * (stage == stages - 1)

    limit = _best_partition(blocks, stages, lambda so_far, stage, count: max(so_far, load(stage, count)))[0]

    def squares(so_far: float, stage: int, count: int) -> float:
        return so_far + load(stage, count) ** 2 if load(stage, count) <= limit else math.inf

    return _best_partition(blocks, stages, squares)[1]


def _best_partition(blocks: int, stages: int,
                    extend: Callable[[float, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """Return the minimal cost of a partition, and the bounds of that partition.

    Args:
        extend: returns the cost after adding a stage, from the cost so far, the stage and its number of blocks.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by number of blocks in the stages so far
    for stage in range(stages):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for assigned, (cost, bounds) in best.items():
            for stop in range(assigned + 1, blocks - (stages - stage - 1) + 1):
                candidate = (extend(cost, stage, stop - assigned), (*bounds, stop))
                extended[stop] = min(candidate, extended.get(stop, candidate))
        best = extended
    return best[blocks]
