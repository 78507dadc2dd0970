"""Samples that a training reads, held to their definition: what must be so in every order that a seed may choose.

A step's samples are the same however ranks and micro batches divide them. Each is a window of T tokens in a row,
with the next token of each as its target; an epoch has all windows between two places once, in an order of its own;
each stream of a mixture gives its share of every block, from epochs of its own; an evaluation has each prediction
once.

The streams here count upwards, so that a token says where it lies.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.certify.one_process import DISAGREES
from ezpz_llm.certify.plain_step import IGNORED
from ezpz_llm.data.samples import Batches, ReadAhead, ValidationWindows
from ezpz_llm.data.shards import BLOCK, Mixture, TokenStream

LENGTH = 16
"""T: tokens of a sample."""
EPOCH, ODD_EPOCH = 128, 100
"""Windows of an epoch: of the first a stream's share of a block has a whole number; the second is no power of 2."""
SECOND = 2500 * LENGTH
"""The first token of the second stream; places count as in the first."""
COUNTS = (3 * BLOCK // 4, BLOCK // 4)
STEP = 24
"""Samples of a step: it divides neither an epoch nor a block."""
DIVISIONS = ((1, 24), (1, 4), (2, 3), (3, 8), (4, 2))
"""Ranks, and samples of a micro batch."""
EVALUATED = 100
"""Predictions of a short evaluation, which end within a window."""


@functools.cache
def hold_reader_to_definition() -> None:
    """Refuse to go on where the samples of a training or an evaluation are not what the definition says.

    Raises:
        UserError: names what is wrong with them.
    """
    if (why := next(complaints(), None)) is not None:
        raise UserError(f"{DISAGREES}: data: {why}", where="certify", exit_code=1,
                        instead="no certificate of any layout before one process is right")


def complaints() -> Iterator[str]:
    """What is wrong with the samples of the readers in `ezpz_llm/data/`."""
    with tempfile.TemporaryDirectory() as folder:
        # In three files: windows cross from one to the next.
        alone, first, second = (_stream(Path(folder), windows, begin)
                                for windows, begin in ((ODD_EPOCH, 0), (EPOCH, 0), (EPOCH, SECOND)))
        yield from _of_steps(alone)
        yield from _of_epochs(alone)
        yield from _of_a_mixture(Mixture((first, second), COUNTS))
        yield from _of_an_evaluation(alone)


def _stream(folder: Path, windows: int, begin: int) -> TokenStream:
    """A stream that counts from `begin`, a few tokens longer than that many windows at any shift."""
    tokens = np.arange(begin, begin + (windows + 1) * LENGTH + 5, dtype="<u2")
    shards = []
    for number, part in enumerate(np.array_split(tokens, 3)):
        path = folder / f"{windows}-{begin}-{number}.bin"
        path.write_bytes(part.tobytes())
        shards.append((path, part.size))
    return TokenStream(shards, np.dtype("<u2"), f"a stream from {begin}")


def _of_steps(stream: TokenStream) -> Iterator[str]:
    """Any division gives a step's samples, and a reader that reads ahead those of any step that is asked for."""
    for consumed in (0, ODD_EPOCH - STEP // 2, BLOCK - STEP // 2):
        whole = _step(stream, consumed)
        if whole.shape != (STEP, LENGTH + 1):
            yield f"the step of {STEP} samples from sample {consumed} has {whole.shape[0]} of {whole.shape[1] - 1}"
            return
        for ranks, micro in DIVISIONS:
            if not np.array_equal(_step(stream, consumed, ranks, micro), whole):
                yield (f"the step from sample {consumed} has other samples on {ranks} ranks in micro batches of "
                       f"{micro} than in one")
    ahead = ReadAhead(stream, block_size=LENGTH, seed=1, global_batch=STEP, micro_batch=STEP, dp_rank=0, dp_size=1)
    for consumed in (0, STEP, STEP, 5 * STEP, 0):
        (found,) = ahead.micro_batches(consumed)
        if not np.array_equal(_joined(*found), _step(stream, consumed)):
            yield f"read ahead, the step from sample {consumed} has other samples than when it is asked for alone"


def _of_epochs(stream: TokenStream) -> Iterator[str]:
    """Each window of an epoch once, in an order that depends on the epoch and on the seed."""
    orders = []
    for seed in (1, 2):
        samples = _samples(stream, 3 * ODD_EPOCH, seed)
        yield from _not_windows(samples)
        for epoch, starts in enumerate(np.split(samples[:, 0], 3)):
            if not np.array_equal(np.sort(starts), starts.min() + LENGTH * np.arange(ODD_EPOCH)):
                yield (f"seed {seed}, epoch {epoch}: not each of {ODD_EPOCH} windows, {LENGTH} tokens apart, comes "
                       "once")
            if np.array_equal(np.sort(starts), starts):
                yield f"seed {seed}, epoch {epoch}: windows come in the order of the text"
            orders.append(((starts - starts.min()) // LENGTH).tolist())
    if len({tuple(order) for order in orders}) < len(orders):
        yield "two epochs, or two seeds, have the same order"


def _of_a_mixture(mixture: Mixture) -> Iterator[str]:
    """Each stream's share of every block, whole epochs of it, not the same ones again, in an order of its own."""
    samples = _samples(mixture, 2 * BLOCK, seed=1)
    yield from _not_windows(samples)
    shifts: list[list[Counter[int]]] = []
    for number, block in enumerate(np.split(samples[:, 0], 2)):
        shifts.append([])
        for part, count in enumerate(COUNTS):
            starts = block[(block >= SECOND) == bool(part)] - SECOND * part
            if starts.size != count:
                yield f"stream {part} gives {starts.size} samples of block {number}, not {count}"
                return
            times = Counter(starts.tolist())
            shift = Counter((starts % LENGTH).tolist())
            if any(times[start] * EPOCH != shift[start % LENGTH] for start in times):
                yield f"stream {part}, block {number}: not each window of its epochs comes equally often"
            shifts[-1].append(shift)
    if shifts[0] == shifts[1]:
        yield "the second block has the epochs of the first"
    alike = _samples(Mixture(mixture.streams, (BLOCK // 2, BLOCK // 2)), BLOCK, seed=1)[:, 0]
    if Counter((alike[alike < SECOND] % LENGTH).tolist()) == Counter((alike[alike >= SECOND] % LENGTH).tolist()):
        yield "two streams of one length have the same epochs"


def _of_an_evaluation(stream: TokenStream) -> Iterator[str]:
    """Each prediction once, however many ranks there are; as many batches on each."""
    for wanted, count in ((None, len(stream) - 1), (EVALUATED, EVALUATED)):
        windows = ValidationWindows(stream, LENGTH, wanted)
        for ranks in (1, 2, 3):
            shares = [list(windows.batches(4, rank, ranks)) for rank in range(ranks)]
            if len({len(share) for share in shares}) > 1:
                yield f"an evaluation on {ranks} ranks has {', '.join(str(len(share)) for share in shares)} batches"
            tokens, targets = (np.concatenate([batch[side] for share in shares for batch in share]).ravel()
                               for side in (0, 1))
            counted = targets != IGNORED
            if not np.array_equal(np.sort(targets[counted]), np.arange(1, count + 1)):
                yield f"an evaluation of {count} predictions on {ranks} ranks has not each of them once"
            if not np.array_equal(tokens[counted] + 1, targets[counted]):
                yield f"an evaluation on {ranks} ranks has targets that are not the next tokens"


def _not_windows(samples: np.ndarray) -> Iterator[str]:
    """A complaint if a sample is not tokens in a row and their next ones."""
    wrong = np.flatnonzero((samples != samples[:, :1] + np.arange(LENGTH + 1)).any(axis=1))
    if wrong.size:
        yield (f"sample {wrong[0]} is not {LENGTH} tokens in a row with the next one of each as its target: "
               f"{samples[wrong[0]].tolist()} ({wrong.size} of {len(samples)})")


def _samples(stream: TokenStream | Mixture, count: int, seed: int) -> np.ndarray:
    """(count, T + 1): the first samples of a training, each token and at the end the last target."""
    steps = [_step(stream, consumed, seed=seed) for consumed in range(0, count, STEP)]
    return np.concatenate(steps)[:count]


def _step(stream: TokenStream | Mixture, consumed: int, ranks: int = 1, micro: int = STEP,
          seed: int = 1) -> np.ndarray:
    """The samples of a step, all ranks' in their order, as `_joined` gives them."""
    return np.concatenate([_joined(*batch) for rank in range(ranks) for batch in Batches(
        stream, block_size=LENGTH, seed=seed, global_batch=STEP, micro_batch=micro, dp_rank=rank,
        dp_size=ranks).micro_batches(consumed)])


def _joined(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(B, T + 1): tokens and the last target; -1 where another target is not the next token."""
    whole = np.concatenate([tokens, targets[:, -1:]], axis=1)
    whole[:, 1:][whole[:, 1:] != targets] = -1
    return whole
