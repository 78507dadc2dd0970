"""Samples of each step. Symbols: B micro-batch size, T block size, n windows per epoch.

Sample i is a pure function of (seed, i) and the stream. Samples are windows of T + 1 tokens at stride T, shuffled
anew in each epoch; in a mixture, each stream has its own order. A step takes samples [consumed, consumed + global
batch), so `consumed` is the complete data position: the number of ranks, the micro-batch size and the number of
accumulation steps only partition those samples, and may change on resume.

The order is computed, never stored (sample_order.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.sample_order import draw_streams, keys, mix, part_seed, permute
from ezpz_llm.training.data.shards import BLOCK, Mixture, TokenStream

IGNORED = -100
"""Target that the loss ignores."""
# Samples whose positions are computed in one call; thousands cost hardly more than a few.
_BLOCK = 4096
_SHIFT_SALT = np.uint64(0xD1B54A32D192ED03)


def windows_per_epoch(stream_len: int, block_size: int) -> int:
    """Return n, the number of windows per epoch, which does not depend on the epoch's shift.

    Raises:
        UserError: the stream is shorter than one window.
    """
    if stream_len < block_size + 1:
        raise UserError(
            f"{stream_len:,} tokens are too few for one window of {block_size} + 1 (block size {block_size})",
            instead="use a larger corpus, another --val-fraction in `data prepare`, or a smaller --block-size",
        )
    return max(1, (stream_len - block_size) // block_size)


def sample_windows(stream_len: int, block_size: int, seed: int, indices: np.ndarray) -> np.ndarray:
    """Return the start offsets of samples, a pure function of (seed, i).

    Epoch e = i // n starts at its own shift in [0, T), so that epochs cut the text at different positions (short
    streams allow fewer shifts). An epoch omits the tokens of fewer than two windows, at the ends of the stream.
    Memory does not depend on the length of the stream.

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
    shifts = np.uint64(min(block_size, stream_len - n * block_size))
    shift = (mix(key ^ _SHIFT_SALT) % shifts).astype(np.int64)
    return shift + permute(places, n, key) * block_size


class Batches:
    """Training batches of one data-parallel rank.

    Args:
        stream: the training split, or a mixture of several.
        block_size: T.
        seed: determines the order.
        global_batch: samples per step, over all ranks.
        micro_batch: B, samples in one forward pass of one rank.

    Raises:
        UserError: global_batch is not a multiple of dp_size * micro_batch, or the stream is too short.
    """

    def __init__(self, stream: TokenStream | Mixture, *, block_size: int, seed: int, global_batch: int,
                 micro_batch: int, dp_rank: int, dp_size: int) -> None:
        at_once = dp_size * micro_batch
        if at_once < 1 or global_batch < 1 or global_batch % at_once:
            near = max(1, global_batch // max(1, at_once)) * at_once
            raise UserError(
                f"a global batch of {global_batch} samples does not divide into micro-batches of {micro_batch} "
                f"on {dp_size} data-parallel ranks ({at_once} at once)",
                instead=f"use a multiple of {at_once}, such as --global-batch-size {near}, or another "
                        "--micro-batch-size",
            )
        self.mixture = as_mixture(stream)
        for part in self.mixture.streams:
            windows_per_epoch(len(part), block_size)
        self.block_size = block_size
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    def micro_batches(self, consumed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (tokens, targets) of each micro-batch of the step that starts at sample `consumed`.

        Both are (B, T) int64. Rank r takes the r-th of dp_size contiguous parts of the step's samples.
        """
        share = self.global_batch // self.dp_size
        first = consumed + self.dp_rank * share
        windows = self._windows(first, first + share)
        return [(part[:, :-1], part[:, 1:])
                for part in np.split(windows, share // self.micro_batch)]

    def _windows(self, first: int, stop: int) -> np.ndarray:
        """Return samples [first, stop), (stop - first, T + 1) int64."""
        streams = self.mixture.streams
        plan = (tuple(map(len, streams)), self.mixture.counts, self.block_size, self.seed)
        blocks = range(first // _BLOCK, (stop - 1) // _BLOCK + 1)
        begin = first - blocks.start * _BLOCK
        stream_indices, starts = (np.concatenate(parts)[begin:begin + stop - first]
                                  for parts in zip(*(_places(*plan, block) for block in blocks), strict=True))
        if len(streams) == 1:
            return streams[0].windows(starts, self.block_size + 1)
        windows = np.empty((stop - first, self.block_size + 1), np.int64)
        for part, stream in enumerate(streams):
            rows = np.flatnonzero(stream_indices == part)
            windows[rows] = stream.windows(starts[rows], self.block_size + 1)
        return windows


@functools.lru_cache(maxsize=16)
def _places(lengths: tuple[int, ...], counts: tuple[int, ...], block_size: int, seed: int,
            block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return stream index and start offset of each sample in a block."""
    return _places_of(lengths, counts, block_size, seed, np.arange(block * _BLOCK, (block + 1) * _BLOCK))


def stream_offsets(mixture: Mixture, block_size: int, seed: int, indices: np.ndarray) -> tuple[np.ndarray,
                                                                                               np.ndarray]:
    """Return stream index and start offset of each sample, int64 like `indices`."""
    return _places_of(tuple(map(len, mixture.streams)), mixture.counts, block_size, seed, indices)


def _places_of(lengths: Sequence[int], counts: Sequence[int], block_size: int, seed: int,
               samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    stream_indices, indices = draw_streams(counts, seed, samples)
    starts = np.empty_like(indices)
    for part, length in enumerate(lengths):
        rows = stream_indices == part
        starts[rows] = sample_windows(length, block_size, part_seed(seed, part), indices[rows])
    return stream_indices, starts


def as_mixture(stream: TokenStream | Mixture) -> Mixture:
    """Return `stream` as a mixture, which has one part for a single stream."""
    return stream if isinstance(stream, Mixture) else Mixture((stream,), (BLOCK,))


class ValidationWindows:
    """Consecutive, non-overlapping windows of T tokens of a split; the last window of each stream is padded.

    For a mixture, the windows of its streams follow one another. `max_tokens` is distributed over them by weight.

    Attributes:
        predictions: number of next-token predictions: one per token of the split except the first, or the first
            `max_tokens` of these.

    Raises:
        UserError: the split has fewer than two tokens, or `max_tokens` is not positive.
    """

    def __init__(self, stream: TokenStream | Mixture, block_size: int,
                 max_tokens: int | None = None) -> None:
        mixture = as_mixture(stream)
        self.block_size = block_size
        self._parts = [(part, _predictions(part, None if max_tokens is None else -(-max_tokens * count // BLOCK)))
                       for part, count in zip(mixture.streams, mixture.counts, strict=True)]
        self.predictions = sum(predictions for _, predictions in self._parts)
        # Index of the first window of each part, followed by the total number of windows.
        self._firsts = np.cumsum([0, *(-(-predictions // block_size) for _, predictions in self._parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def batches(self, micro_batch: int, dp_rank: int = 0,
                dp_size: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the contiguous share of rank `dp_rank` as (tokens, targets), (micro_batch, T) int64.

        Every rank gets the same number of batches of full shape, so that collectives in the forward pass match.
        Padding has targets of -100, which the loss ignores.
        """
        rounds = -(-len(self) // (micro_batch * dp_size))
        for start in range(dp_rank * rounds, (dp_rank + 1) * rounds):
            yield self._batch(start * micro_batch, micro_batch)

    def _batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((count, self.block_size), np.int64)
        targets = np.full((count, self.block_size), IGNORED, np.int64)
        for row, window in enumerate(range(first, min(first + count, len(self)))):
            part = int(np.searchsorted(self._firsts, window, side="right")) - 1
            stream, predictions = self._parts[part]
            begin = (window - int(self._firsts[part])) * self.block_size
            text = stream[begin:min(begin + self.block_size, predictions) + 1]
            tokens[row, :text.size - 1], targets[row, :text.size - 1] = text[:-1], text[1:]
        return tokens, targets


def _predictions(stream: TokenStream, max_tokens: int | None) -> int:
    requested = len(stream) if max_tokens is None else max_tokens
    predictions = min(len(stream) - 1, requested)
    if predictions < 1:
        raise UserError(
            f"nothing to validate on: the split has {len(stream)} tokens and {requested} predictions are requested",
            where=stream.where, instead="prepare the corpus with a larger --val-fraction, or request more tokens",
        )
    return predictions


class ReadAhead(Batches):
    """`Batches` with a thread that reads the next step while the device computes the current one.

    A step waits only if reading is slower than training. Steps may be requested in any order and repeatedly;
    steps that were not read ahead are read on request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[int, Future[list[tuple[np.ndarray, np.ndarray]]]] | None = None

    def micro_batches(self, consumed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the micro-batches of a step, and start reading the next step."""
        read_step = super().micro_batches
        if self._next and self._next[0] == consumed:
            micro_batches = self._next[1].result()
        else:
            micro_batches = read_step(consumed)
        following = consumed + self.global_batch
        if not self._next or self._next[0] != following:
            self._next = following, self._reader.submit(read_step, following)
        return micro_batches
