"""Distinct seeds for all random streams of a run (does not import torch)."""

from __future__ import annotations

from typing import Literal, get_args

from ezpz_llm.core.base import UserError

Purpose = Literal["init", "data", "dropout", "sample"]

_PURPOSES = get_args(Purpose)
_MASK = 2**64 - 1


def seed_for(seed: int, purpose: Purpose, index: int = 0) -> int:
    """Return the 64-bit seed of a random stream.

    (seed, purpose, index) is packed into 64 bits and mixed by the finalizer of SplitMix64 (Steele et al. 2014). The
    finalizer is a bijection, so that different (seed, purpose, index) never yield the same seed.

    Args:
        seed: seed of the run, below 2^32.
        index: number of the stream, below 2^24: for "init" the number of the parameter, for "dropout" the
            data-parallel rank.

    Raises:
        UserError: the seed or the index is out of range.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed {seed} is out of range", where="--seed", instead="0 to 4294967295")
    if not 0 <= index < 2**24:
        raise UserError(f"index {index} of a random stream is out of range")
    value = seed << 32 | _PURPOSES.index(purpose) << 24 | index
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
