"""Data position of a run: the number of samples consumed, and a hash of the samples themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ezpz_llm.data.samples import mix
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import reduce

_WORD = 1 << 64


@dataclass(frozen=True)
class Position:
    """Samples [0, consumed) of the endless sample order have been trained on.

    The hash is the sum modulo 2^64 of a hash of each sample's number and tokens. So each rank can add up what it
    was really given, and the sum over ranks is the same however samples were cut into steps, micro batches and
    ranks; a sample that is lost, repeated or swapped for another changes it. Two runs that consumed the same
    samples of the same data have the same hash, whatever happened on the way.

    Attributes:
        agreed: the hash of all samples up to the last `agree`.
        own: the sum over what this rank was given since then.
    """

    consumed: int = 0
    agreed: int = 0
    own: int = 0

    @classmethod
    def at(cls, consumed: int, sample_hash: str) -> Position:
        """The position that a checkpoint names."""
        return cls(consumed, int(sample_hash, 16) % _WORD)

    def advance(self, samples: int, own: int) -> Position:
        """The position after the next `samples` samples; those that this rank answers for hash to `own`."""
        return Position(self.consumed + samples, self.agreed, (self.own + own) % _WORD)

    def agree(self, dist: Dist) -> Position:
        """The same position with the hash of all ranks' samples. Collective."""
        # As signed words, which wrap around as the unsigned ones do.
        own = torch.from_numpy(np.array([self.own], np.uint64).view(np.int64))
        return Position(self.consumed, (self.agreed + int(reduce(dist, own).item())) % _WORD)

    @property
    def sample_hash(self) -> str:
        """The hash as of the last `agree`, 16 hexadecimal digits."""
        return f"{self.agreed:016x}"


def hash_samples(first: int, tokens: np.ndarray) -> int:
    """The sum of the hashes of samples [first, first + B), whose tokens are (B, T) int64.

    A sample's hash is a random linear combination of its tokens modulo 2^64, mixed with its number.
    """
    rows = (tokens.astype(np.uint64) * _weights(tokens.shape[1])).sum(axis=1, dtype=np.uint64)
    numbers = np.arange(first, first + len(tokens), dtype=np.uint64)
    return int(mix(rows ^ mix(numbers + np.uint64(1))).sum(dtype=np.uint64))


@functools.lru_cache(maxsize=4)
def _weights(length: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).integers(_WORD, size=length, dtype=np.uint64)
