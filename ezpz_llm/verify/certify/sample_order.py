"""Checks of the data reader: properties of the sample order that hold for every seed.

A step has the same samples however it is split over ranks and micro-batches. A sample is a window of T consecutive
tokens, with the next token of each as its target. An epoch has each window exactly once, in an order that depends
on the seed and the epoch. Each stream of a mixture contributes its share to every block, from its own epochs. An
evaluation has each prediction exactly once.

The streams used here count upwards, so that the value of a token is its position.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.samples import Batches, ReadAhead, ValidationWindows
from ezpz_llm.training.data.shards import BLOCK, Mixture, TokenStream
from ezpz_llm.verify.certify.one_process import DISAGREES
from ezpz_llm.verify.certify.plain_step import IGNORED

LENGTH = 16
"""Tokens per sample (T)."""
EPOCH, _ODD_EPOCH = 128, 100
"""Windows per epoch. EPOCH divides a stream's share of a block; _ODD_EPOCH is not a power of 2."""
SECOND = 2500 * LENGTH
"""First token of the second stream. All tokens of the first stream are smaller."""
COUNTS = (3 * BLOCK // 4, BLOCK // 4)
"""Samples of each stream of the mixture in a block."""
STEP = 24
"""Samples per step. Neither an epoch nor a block is a multiple of it."""
_DIVISIONS = ((1, 24), (1, 4), (2, 3), (3, 8), (4, 2))
"""Pairs of data-parallel size and micro-batch size."""
EVALUATED = 100
"""Predictions of the short evaluation. It ends within a window."""


@functools.cache
def check_reader() -> None:
    """Check the samples of training and evaluation.

    Raises:
        UserError: names the first property that does not hold.
    """
    if (problem := next(find_problems(), None)) is not None:
        raise UserError(f"{DISAGREES}: data: {problem}", where="certify", exit_code=1,
                        instead="fix this first: every layout is compared with the single process")


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check of the readers in `ezpz_llm/training/data/`."""
    with tempfile.TemporaryDirectory() as folder:
        alone, first, second = (_stream(Path(folder), windows, begin)
                                for windows, begin in ((_ODD_EPOCH, 0), (EPOCH, 0), (EPOCH, SECOND)))
        yield from _check_steps(alone)
        yield from _check_epochs(alone)
        yield from _check_mixture(Mixture((first, second), COUNTS))
        yield from _check_evaluation(alone)


def _stream(folder: Path, windows: int, begin: int) -> TokenStream:
    """Create a stream that counts from `begin`, with `windows` windows at any shift of their start."""
    tokens = np.arange(begin, begin + (windows + 1) * LENGTH + 5, dtype="<u2")
    shards = []  # several, so that windows cross file boundaries
    for number, part in enumerate(np.array_split(tokens, 3)):
        path = folder / f"{windows}-{begin}-{number}.bin"
        path.write_bytes(part.tobytes())
        shards.append((path, part.size))
    return TokenStream(shards, np.dtype("<u2"), f"a stream from {begin}")


def _check_steps(stream: TokenStream) -> Iterator[str]:
    """Check that a step's samples do not depend on the number of ranks, the micro-batches, or reading ahead."""
    for consumed in (0, _ODD_EPOCH - STEP // 2, BLOCK - STEP // 2):
        whole = _step(stream, consumed)
        if whole.shape != (STEP, LENGTH + 1):
            yield (f"the step of {STEP} samples from sample {consumed} has {whole.shape[0]} samples of "
                   f"{whole.shape[1] - 1} tokens")
            return
        for ranks, micro in _DIVISIONS:
            if not np.array_equal(_step(stream, consumed, ranks, micro), whole):
                yield (f"the step from sample {consumed} has different samples on {ranks} ranks in micro-batches "
                       f"of {micro} than in a single batch")
    ahead = ReadAhead(stream, block_size=LENGTH, seed=1, global_batch=STEP, micro_batch=STEP, dp_rank=0, dp_size=1)
    for consumed in (0, STEP, STEP, 5 * STEP, 0):
        (batch,) = ahead.micro_batches(consumed)
        if not np.array_equal(_join(*batch), _step(stream, consumed)):
            yield f"the step from sample {consumed} has different samples with reading ahead than without"


def _check_epochs(stream: TokenStream) -> Iterator[str]:
    """Check that an epoch has each window once, in an order that depends on the epoch and on the seed."""
    orders = []
    for seed in (1, 2):
        samples = _samples(stream, 3 * _ODD_EPOCH, seed)
        yield from _not_windows(samples)
        for epoch, starts in enumerate(np.split(samples[:, 0], 3)):
            if not np.array_equal(np.sort(starts), starts.min() + LENGTH * np.arange(_ODD_EPOCH)):
                yield (f"seed {seed}, epoch {epoch}: some of the {_ODD_EPOCH} windows, {LENGTH} tokens apart, do "
                       "not occur exactly once")
            if np.array_equal(np.sort(starts), starts):
                yield f"seed {seed}, epoch {epoch}: windows are not shuffled"
            orders.append(((starts - starts.min()) // LENGTH).tolist())
    if len({tuple(order) for order in orders}) < len(orders):
        yield "two epochs, or two seeds, have the same order"


def _check_mixture(mixture: Mixture) -> Iterator[str]:
    """Check that each block has every stream's share, in whole epochs that differ by block and by stream."""
    samples = _samples(mixture, 2 * BLOCK, seed=1)
    yield from _not_windows(samples)
    shifts: list[list[Counter[int]]] = []
    for number, block in enumerate(np.split(samples[:, 0], 2)):
        shifts.append([])
        for part, count in enumerate(COUNTS):
            starts = block[(block >= SECOND) == bool(part)] - SECOND * part
            if starts.size != count:
                yield f"stream {part} contributes {starts.size} samples to block {number}, not {count}"
                return
            times = Counter(starts.tolist())
            shift = Counter((starts % LENGTH).tolist())
            if any(times[start] * EPOCH != shift[start % LENGTH] for start in times):
                yield f"stream {part}, block {number}: the windows of its epochs do not occur equally often"
            shifts[-1].append(shift)
    if shifts[0] == shifts[1]:
        yield "the second block repeats the epochs of the first"
    mixed = _samples(Mixture(mixture.streams, (BLOCK // 2, BLOCK // 2)), BLOCK, seed=1)[:, 0]
    if Counter((mixed[mixed < SECOND] % LENGTH).tolist()) == Counter((mixed[mixed >= SECOND] % LENGTH).tolist()):
        yield "two streams of equal length have the same epochs"


def _check_evaluation(stream: TokenStream) -> Iterator[str]:
    """Check that an evaluation has each prediction once, and the same number of batches on every rank."""
    for max_tokens, count in ((None, len(stream) - 1), (EVALUATED, EVALUATED)):
        windows = ValidationWindows(stream, LENGTH, max_tokens)
        for ranks in (1, 2, 3):
            shares = [list(windows.batches(4, rank, ranks)) for rank in range(ranks)]
            if len({len(share) for share in shares}) > 1:
                yield f"an evaluation on {ranks} ranks has {', '.join(str(len(share)) for share in shares)} batches"
            tokens, targets = (np.concatenate([batch[side] for share in shares for batch in share]).ravel()
                               for side in (0, 1))
            counted = targets != IGNORED
            if not np.array_equal(np.sort(targets[counted]), np.arange(1, count + 1)):
                yield f"an evaluation of {count} predictions on {ranks} ranks does not have each exactly once"
            if not np.array_equal(tokens[counted] + 1, targets[counted]):
                yield f"an evaluation on {ranks} ranks has targets that are not the next token"


def _not_windows(samples: np.ndarray) -> Iterator[str]:
    """Yield a problem if a sample is not consecutive tokens, with the next tokens as targets."""
    bad = np.flatnonzero((samples != samples[:, :1] + np.arange(LENGTH + 1)).any(axis=1))
    if bad.size:
        yield (f"sample {bad[0]} is not {LENGTH} consecutive tokens with the next token of each as its target: "
               f"{samples[bad[0]].tolist()} ({bad.size} of {len(samples)})")


def _samples(stream: TokenStream | Mixture, count: int, seed: int) -> np.ndarray:
    """Return the first `count` training samples, each as its tokens and last target: (count, T + 1)."""
    steps = [_step(stream, consumed, seed=seed) for consumed in range(0, count, STEP)]
    return np.concatenate(steps)[:count]


def _step(stream: TokenStream | Mixture, consumed: int, ranks: int = 1, micro: int = STEP,
          seed: int = 1) -> np.ndarray:
    """Return the samples of a step over all ranks, as `_join` returns them."""
    return np.concatenate([_join(*batch) for rank in range(ranks) for batch in Batches(
        stream, block_size=LENGTH, seed=seed, global_batch=STEP, micro_batch=micro, dp_rank=rank,
        dp_size=ranks).micro_batches(consumed)])


def _join(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Append the last target to the tokens, (B, T + 1); -1 marks targets that are not the next token."""
    whole = np.concatenate([tokens, targets[:, -1:]], axis=1)
    whole[:, 1:][whole[:, 1:] != targets] = -1
    return whole
