"""Which tokens a step takes. Letters: B micro batch, T block size, n windows an epoch.

Sample i is a pure function of (seed, i) and the stream: windows of T + 1 tokens at stride T, in an order shuffled
anew each epoch. A step takes samples [consumed, consumed + global batch), so `consumed` is the whole position:
ranks, micro batch and accumulation only divide those samples, and any of them may change on resume.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from ezpz_llm.data.permute import keys, mix, permute
from ezpz_llm.data.shards import TokenStream
from ezpz_llm.errors import UserError

IGNORED = -100
"""The target that a loss leaves out."""
# Samples whose starts are computed in one call, which costs hardly more for thousands than for a few.
_BLOCK = 4096
_SHIFT_SALT = np.uint64(0xD1B54A32D192ED03)


def windows_per_epoch(stream_len: int, block_size: int) -> int:
    """n: how many windows an epoch has, whatever its shift.

    Raises:
        UserError: the stream is shorter than one window.
    """
    if stream_len < block_size + 1:
        raise UserError(
            f"{stream_len:,} tokens are too few for one window of {block_size} + 1 (block size {block_size})",
            instead="take a larger corpus, another --val-fraction in `data prepare`, or a smaller block size",
        )
    return max(1, (stream_len - block_size) // block_size)


def sample_windows(stream_len: int, block_size: int, seed: int, indices: np.ndarray) -> np.ndarray:
    """Start offsets of samples: a pure function of (seed, i).

    Epoch e = i // n begins at a shift of its own in [0, T), so that no two epochs cut the text at the same places
    (short streams have less room to shift); less than two windows' tokens are left out of an epoch, at its ends.
    No permutation is held in memory: a stream of 10^10 tokens costs what a short one does.

    Args:
        indices: int64, 0 or more.

    Returns:
        int64 of the same shape, each in [0, stream_len - T).

    Raises:
        UserError: the stream is shorter than one window.
    """
    n = windows_per_epoch(stream_len, block_size)
    epochs, places = np.divmod(np.asarray(indices, np.int64), n)
    key = keys(seed, epochs)
    room = np.uint64(min(block_size, stream_len - n * block_size))
    shift = (mix(key ^ _SHIFT_SALT) % room).astype(np.int64)
    return shift + permute(places, n, key) * block_size


class Batches:
    """One data-parallel rank's share of every step of training.

    Args:
        stream: the training split.
        block_size: T.
        seed: chooses the order.
        global_batch: samples a step, over all ranks.
        micro_batch: B, samples in one forward pass of one rank.

    Raises:
        UserError: global_batch is not a multiple of dp_size * micro_batch, or the stream is too short.
    """

    def __init__(self, stream: TokenStream, *, block_size: int, seed: int, global_batch: int, micro_batch: int,
                 dp_rank: int, dp_size: int) -> None:
        at_once = dp_size * micro_batch
        if at_once < 1 or global_batch < 1 or global_batch % at_once:
            near = max(1, global_batch // max(1, at_once)) * at_once
            raise UserError(
                f"a global batch of {global_batch} samples does not divide into micro batches of {micro_batch} "
                f"on {dp_size} data-parallel ranks ({at_once} at once)",
                instead=f"give a multiple of {at_once}, such as --global-batch {near}, or another --micro-batch",
            )
        windows_per_epoch(len(stream), block_size)
        self.stream = stream
        self.block_size = block_size
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    def micro_batches(self, consumed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The step that begins at sample `consumed`: (tokens, targets) for each accumulation step.

        Both are (B, T) int64. Rank r takes the r-th of dp_size contiguous parts of the step's samples.
        """
        share = self.global_batch // self.dp_size
        first = consumed + self.dp_rank * share
        windows = self.stream.windows(self._starts(first, first + share), self.block_size + 1)
        return [(part[:, :-1], part[:, 1:])
                for part in np.split(windows, share // self.micro_batch)]

    def _starts(self, first: int, stop: int) -> np.ndarray:
        blocks = range(first // _BLOCK, (stop - 1) // _BLOCK + 1)
        starts = [_start_block(len(self.stream), self.block_size, self.seed, block) for block in blocks]
        return np.concatenate(starts)[first - blocks.start * _BLOCK:stop - blocks.start * _BLOCK]


@functools.lru_cache(maxsize=16)
def _start_block(stream_len: int, block_size: int, seed: int, block: int) -> np.ndarray:
    return sample_windows(stream_len, block_size, seed, np.arange(block * _BLOCK, (block + 1) * _BLOCK))


class ValidationWindows:
    """A split from its start, in windows of T that do not overlap; the last one is padded.

    Attributes:
        predictions: how many next-token predictions they hold: each of the split's (its length - 1) once, or
            the first `max_tokens` of them.

    Raises:
        UserError: fewer than two tokens, so nothing to predict.
    """

    def __init__(self, stream: TokenStream, block_size: int, max_tokens: int | None) -> None:
        wanted = len(stream) if max_tokens is None else max_tokens
        self.predictions = min(len(stream) - 1, wanted)
        if self.predictions < 1:
            raise UserError(
                f"nothing to validate on: the split has {len(stream)} tokens, predictions wanted: {wanted}",
                where=stream.where, instead="prepare the corpus with a larger --val-fraction, or ask for more",
            )
        self.stream = stream
        self.block_size = block_size

    def __len__(self) -> int:
        return -(-self.predictions // self.block_size)

    def batches(self, micro_batch: int, dp_rank: int = 0,
                dp_size: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rank `dp_rank`'s contiguous share, as (tokens, targets) of shape (micro_batch, T) int64.

        Every rank gets equally many batches, all of full shape, so that collectives in a forward pass match;
        what is padding has targets of -100 and counts for nothing.
        """
        rounds = -(-len(self) // (micro_batch * dp_size))
        for start in range(dp_rank * rounds, (dp_rank + 1) * rounds):
            yield self._batch(start * micro_batch, micro_batch)

    def _batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        size = count * self.block_size
        begin = first * self.block_size
        stop = min(begin + size, self.predictions)
        tokens, targets = np.zeros(size, np.int64), np.full(size, IGNORED, np.int64)
        if begin < stop:
            tokens[:stop - begin] = self.stream[begin:stop]
            targets[:stop - begin] = self.stream[begin + 1:stop + 1]
        return tokens.reshape(count, -1), targets.reshape(count, -1)


def validation_windows(stream: TokenStream, block_size: int, max_tokens: int | None = None) -> ValidationWindows:
    """All of a split's next-token predictions, or the first `max_tokens`, in order.

    Raises:
        UserError: the split is too short, or `max_tokens` is not positive.
    """
    return ValidationWindows(stream, block_size, max_tokens)
