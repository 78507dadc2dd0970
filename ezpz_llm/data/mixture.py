"""Several token streams mixed by weights: which of them sample i comes from is a pure function of (seed, i).

Of every 4096 consecutive samples each stream gives a fixed number, its weight rounded to 1/4096, in an order that
is shuffled anew each time. So the share of a stream is exact over any stretch of blocks, the n-th sample of a
stream is found without counting, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ezpz_llm.base.errors import UserError
from ezpz_llm.data.permute import keys, permute

BLOCK = 4096
_MIX_SALT = 0x6D69787475726500


def shares(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Each weight's number of 4096 samples, by largest remainders.

    Raises:
        UserError: a weight is not positive, or too small to be given one.
    """
    total = float(sum(weights))
    for name, weight in zip(names, weights, strict=True):
        if not (weight > 0 and np.isfinite(total) and weight / total * BLOCK >= 1):
            raise UserError(f"{name} has the weight {weight:g} of {total:g}; the least is 1 in {BLOCK}",
                            where="--corpus", instead="a larger weight, or leave that part out")
    exact = [weight / total * BLOCK for weight in weights]
    counts = [int(value) for value in exact]
    rest = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in rest[:BLOCK - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def draw(counts: Sequence[int], seed: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which stream each sample comes from, and which of that stream's own samples it is.

    Over all samples, each sample of each stream comes once.

    Args:
        indices: int64, 0 or more.

    Returns:
        Two int64 arrays of the same shape.
    """
    if len(counts) == 1:
        return np.zeros_like(indices), indices
    blocks, places = np.divmod(indices, BLOCK)
    values = permute(places, BLOCK, keys(seed ^ _MIX_SALT, blocks))
    begins = np.cumsum([0, *counts])
    which = np.searchsorted(begins, values, side="right") - 1
    return which, blocks * np.asarray(counts)[which] + values - begins[which]


def part_seed(seed: int, part: int) -> int:
    """The seed of a stream's own order; the first one's is the run's, as if it stood alone."""
    return seed + part * 0x9E3779B97F4A7C15


