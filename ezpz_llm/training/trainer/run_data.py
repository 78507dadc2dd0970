"""Data of a run, and the position in the order of its samples: their number, and their hash."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ezpz_llm.training.data.sample_order import mix
from ezpz_llm.training.data.samples import Batches, ValidationWindows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_reduce


@dataclass
class RunData:
    """Tokens of a run, its training batches and validation windows, and the samples consumed so far."""

    tokens: TokenData
    batches: Batches
    validation: ValidationWindows
    position: Position

    @property
    def consumed_tokens(self) -> int:
        """Number of training tokens consumed so far, over all ranks."""
        return self.position.consumed * self.batches.block_size


_MODULUS = 1 << 64


@dataclass(frozen=True)
class Position:
    """Position in the sample order: the run has consumed samples [0, consumed).

    The hash is the sum modulo 2^64 of a hash of each sample's number and tokens. So each rank can add up its own
    samples, and the sum over ranks does not depend on how samples are split into steps, micro-batches and ranks. A
    lost, repeated or swapped sample changes it. Runs that consumed the same samples of the same data have the same
    hash, no matter how often they were resumed.

    Attributes:
        agreed: hash of all samples up to the last `agree`.
        own: sum of the hashes of this rank's samples since then.
    """

    consumed: int = 0
    agreed: int = 0
    own: int = 0

    @classmethod
    def at(cls, consumed: int | None, sample_hash: str | None) -> Position:
        """Return the position recorded in a checkpoint, which is 0 if it is missing."""
        return cls(consumed or 0, int(sample_hash or "0", 16) % _MODULUS)

    def advance(self, samples: int, own: int) -> Position:
        """Return the position after the next `samples` samples; `own` is the hash of this rank's share."""
        return Position(self.consumed + samples, self.agreed, (self.own + own) % _MODULUS)

    def agree(self, dist: Dist) -> Position:
        """Return the same position with `own` summed over all ranks into `agreed`. Collective."""
        # torch does not reduce uint64; signed sums wrap around alike.
        own = torch.from_numpy(np.array([self.own], np.uint64).view(np.int64))
        return Position(self.consumed, (self.agreed + int(all_reduce(dist, own).item())) % _MODULUS)

    @property
    def sample_hash(self) -> str:
        """Hash as of the last `agree`, 16 hexadecimal digits."""
        return f"{self.agreed:016x}"


def hash_samples(first: int, tokens: np.ndarray) -> int:
    """Return the sum of the hashes of samples [first, first + B), whose tokens are (B, T) int64.

    A sample's hash is a random linear combination of its tokens modulo 2^64, mixed with its number.
    """
    rows = (tokens.astype(np.uint64) * _weights(tokens.shape[1])).sum(axis=1, dtype=np.uint64)
    numbers = np.arange(first, first + len(tokens), dtype=np.uint64)
    return int(mix(rows ^ mix(numbers + np.uint64(1))).sum(dtype=np.uint64))


@functools.lru_cache(maxsize=4)
def _weights(length: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).integers(_MODULUS, size=length, dtype=np.uint64)
