"""Random order of samples: a permutation of each epoch, and draws among the streams of a mixture.

The order is computed, never stored. The shuffle of [0, n) is evaluated at single positions, since n may be 10^10:
an unbalanced Feistel network permutes [0, 2^b), the smallest such range that contains [0, n), and a value outside
[0, n) is permuted again until it falls inside ("cycle walking", Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"), which takes fewer than two rounds on average.

In a mixture, samples form blocks of 4096. Each stream provides a fixed number of the samples of a block (its weight
rounded to 1/4096), in an order that is shuffled anew for each block. So a stream's share is exact over any number
of blocks, and the n-th sample of a stream is found without counting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ezpz_llm.training.data.shards import BLOCK

_MIX_SALT = 0x6D69787475726500

_ROUNDS = 8
_WORD = (1 << 64) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer, a bijection of 64-bit words in which each input bit affects all output bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """Return a 64-bit key for each (seed, epoch)."""
    start = mix(np.array([(seed + _GOLDEN) & _WORD], np.uint64))
    return mix(start ^ mix(epochs.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(1)))


def permute(places: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Return the value of a permutation of [0, n) at each position.

    Args:
        places: positions, int64 in [0, n).
        key: uint64, one per position; selects the permutation.

    Returns:
        int64 in [0, n); each value once over all positions of one key.
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


def draw_streams(counts: Sequence[int], seed: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream of each sample, and the sample's index within that stream.

    Over all samples, each sample of each stream occurs once.

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
    stream_indices = np.searchsorted(begins, values, side="right") - 1
    return stream_indices, blocks * np.asarray(counts)[stream_indices] + values - begins[stream_indices]


def part_seed(seed: int, part: int) -> int:
    """Return the seed for the order of a stream; the first stream uses `seed` itself, as without a mixture."""
    return seed + part * 0x9E3779B97F4A7C15
