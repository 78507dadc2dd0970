"""Order of samples, a pure function of (seed, i), never stored: a seeded shuffle, and streams mixed by weights.

The shuffle of [0, n) is computed place by place: n may be 10^10. An unbalanced Feistel network permutes [0, 2^b),
the smallest such range that holds [0, n); a value outside [0, n) is permuted again until it falls inside ("cycle
walking", Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), which takes fewer than two turns on
average.

In a mixture each stream gives a fixed number of every 4096 consecutive samples, its weight rounded to 1/4096, in an
order that is shuffled anew each time. So the share of a stream is exact over any stretch of blocks, the n-th sample
of a stream is found without counting, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ezpz_llm.base.errors import UserError

BLOCK = 4096
_MIX_SALT = 0x6D69787475726500

_ROUNDS = 8
_WORD = (1 << 64) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: a bijection of 64-bit words that spreads each bit over all of them."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """One 64-bit key for each (seed, epoch)."""
    start = mix(np.array([(seed + _GOLDEN) & _WORD], np.uint64))
    return mix(start ^ mix(epochs.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(1)))


def permute(places: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The shuffle's value at each place.

    Args:
        places: int64 in [0, n).
        key: uint64, one a place; a key chooses a shuffle.

    Returns:
        int64 in [0, n); over all places of one key, each value once.
    """
    bits = max(2, (n - 1).bit_length())
    values = _feistel(places.astype(np.uint64), bits, key)
    while (outside := np.flatnonzero(values >= np.uint64(n))).size:
        values[outside] = _feistel(values[outside], bits, key[outside])
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(0, _ROUNDS, 2):
        high = high ^ (mix(low + _round_key(key, number)) & high_mask)
        low = low ^ (mix(high + _round_key(key, number + 1)) & low_mask)
    return (high << low_bits) | low


def _round_key(key: np.ndarray, number: int) -> np.ndarray:
    return mix(key + np.uint64((number * _GOLDEN) & _WORD))



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


