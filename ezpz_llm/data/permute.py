"""A seeded shuffle of [0, n) that is computed place by place, never stored: n may be 10^10.

An unbalanced Feistel network permutes [0, 2^b), the smallest such range that holds [0, n); a value that falls
outside [0, n) is permuted again until it falls inside ("cycle walking", Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"), which takes fewer than two turns on average.
"""

from __future__ import annotations

import numpy as np

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
