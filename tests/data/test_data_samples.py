"""Samples: the order is a pure function of (seed, i), and the same for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from launch_runs import cpu_seconds
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.sample_order import keys, permute
from ezpz_llm.training.data.samples import IGNORED, Batches, ValidationWindows, sample_windows, windows_per_epoch
from ezpz_llm.training.data.shards import TokenStream


def stream_of(tokens: np.ndarray, folder: Path, shard_tokens: int) -> TokenStream:
    """Write `tokens` to shard files and return their stream."""
    shards = []
    for number, start in enumerate(range(0, len(tokens), shard_tokens)):
        part = tokens[start:start + shard_tokens].astype("<u2")
        (folder / f"{number}.bin").write_bytes(part.tobytes())
        shards.append((folder / f"{number}.bin", part.size))
    return TokenStream(shards, np.dtype("<u2"), "the test's stream")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    # Token = position, so that a window shows its start; with shards of 700, many windows cross a shard border.
    return stream_of(np.arange(5000), tmp_path_factory.mktemp("stream"), 700)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    places = np.arange(n)
    assert sorted(permute(places, n, keys(seed, np.full(n, epoch)))) == list(range(n))


def test_shuffle_is_even() -> None:
    """All 24 permutations of 4 items are about equally frequent; no position of 1000 favors a value."""
    orders = np.array([permute(np.arange(4), 4, keys(seed, np.zeros(4, int))) for seed in range(4800)])
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 140
    assert counts.max() < 260
    first = np.array([permute(np.zeros(1, int), 1000, keys(seed, np.zeros(1, int)))[0] for seed in range(3000)])
    assert abs(first.mean() - 499.5) < 25
    order = permute(np.arange(1000), 1000, keys(3, np.zeros(1000, int)))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


@given(length=st.integers(9, 400), block=st.integers(1, 8), seed=st.integers(0, 99), first=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_epochs_cover_the_stream_once(length: int, block: int, seed: int, first: int) -> None:
    n = windows_per_epoch(length, block)
    epoch = first // n
    starts = np.sort(sample_windows(length, block, seed, np.arange(epoch * n, (epoch + 1) * n)))
    assert starts[0] >= 0
    assert starts[-1] + block + 1 <= length
    assert (np.diff(starts) == block).all()
    # An epoch omits less than two windows, as documented.
    assert length - 1 - n * block < 2 * block
    # Computing one index alone gives the same result as computing several.
    assert sample_windows(length, block, seed, np.array([first]))[0] == sample_windows(
        length, block, seed, np.arange(first, first + 3))[0]


def test_epochs_and_seeds_differ_and_runs_agree() -> None:
    n = windows_per_epoch(5000, 16)
    epochs = [sample_windows(5000, 16, 7, np.arange(e * n, (e + 1) * n)) for e in range(4)]
    assert len({tuple(np.sort(epoch)) for epoch in epochs}) > 1  # other shifts: other windows
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 4  # other orders
    assert not np.array_equal(epochs[0], sample_windows(5000, 16, 8, np.arange(n)))
    np.testing.assert_array_equal(epochs[2], sample_windows(5000, 16, 7, np.arange(2 * n, 3 * n)))


def test_ten_billion_tokens_cost_no_memory() -> None:
    began = cpu_seconds()
    starts = sample_windows(10**10, 1024, 1, np.arange(10**9, 10**9 + 4096))
    assert cpu_seconds() - began < scaled(1)
    assert starts.min() >= 0
    assert starts.max() < 10**10 - 1024
    assert len(np.unique(starts)) == 4096


def step_of(stream: TokenStream, consumed: int, dp_size: int, micro: int, **options: int) -> np.ndarray:
    """Return the first tokens of a step's windows, over ranks and micro-batches in order."""
    settings = {"block_size": 16, "seed": 3, "global_batch": 24} | options
    firsts = []
    for rank in range(dp_size):
        batches = Batches(stream, micro_batch=micro, dp_rank=rank, dp_size=dp_size, **settings)
        entries = batches.micro_batches(consumed)
        assert len(entries) == settings["global_batch"] // (dp_size * micro)
        for tokens, targets in entries:
            assert tokens.shape == targets.shape == (micro, settings["block_size"])
            assert tokens.dtype == targets.dtype == np.int64
            np.testing.assert_array_equal(targets[:, :-1], tokens[:, 1:])
            np.testing.assert_array_equal(targets, tokens + 1)  # the next token, also over shard borders
            firsts.append(tokens[:, 0])
    return np.concatenate(firsts)


@pytest.mark.parametrize("consumed", [0, 24, 300, 311, 4090])
def test_a_step_is_the_same_for_any_ranks_and_micro_batch(stream: TokenStream, consumed: int) -> None:
    expected = sample_windows(len(stream), 16, 3, np.arange(consumed, consumed + 24))
    for dp_size, micro in [(1, 24), (1, 1), (2, 6), (3, 4), (4, 3), (8, 3), (24, 1)]:
        np.testing.assert_array_equal(step_of(stream, consumed, dp_size, micro), expected)


@given(cut=st.integers(0, 500), batch=st.sampled_from([6, 12, 24]))
@settings(max_examples=25, deadline=None)
def test_resume_continues_from_any_position(stream: TokenStream, cut: int, batch: int) -> None:
    """Resuming with another global batch size continues the sample sequence of an uninterrupted run."""
    first = step_of(stream, cut, 2, 3, global_batch=6)
    second = step_of(stream, cut + 6, 2, batch // 2, global_batch=batch)
    np.testing.assert_array_equal(np.concatenate([first, second]),
                                  sample_windows(len(stream), 16, 3, np.arange(cut, cut + 6 + batch)))


def test_indivisible_global_batch_is_rejected(stream: TokenStream) -> None:
    with pytest.raises(UserError, match=r"24 samples .* micro-batches of 5 on 2 .*\(10 at once\)") as caught:
        step_of(stream, 0, 2, 5)
    assert "--global-batch-size 20" in str(caught.value)
    with pytest.raises(UserError, match="2 samples"):  # more ranks than the batch can feed
        step_of(stream, 0, 4, 1, global_batch=2)


def test_short_streams(tmp_path: Path) -> None:
    tiny = stream_of(np.arange(17), tmp_path, 5)
    np.testing.assert_array_equal(step_of(tiny, 0, 2, 2, global_batch=4), [0, 0, 0, 0])
    with pytest.raises(UserError, match=r"17 tokens are too few for one window of 17 \+ 1"):
        step_of(tiny, 0, 1, 1, block_size=17, global_batch=1)


@pytest.mark.parametrize(("length", "block", "max_tokens"), [
    (5000, 16, None), (5000, 64, None), (65, 16, None), (66, 16, None), (2, 16, None), (5000, 16, 1000),
    (5000, 16, 1001), (100, 16, 10**9)])
@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (4, 1), (3, 2), (5, 4)])
def test_validation_holds_each_prediction_once(tmp_path: Path, length: int, block: int, max_tokens: int | None,
                                               micro: int, ranks: int) -> None:
    windows = ValidationWindows(stream_of(np.arange(length), tmp_path, 700), block, max_tokens)
    expected = min(length - 1, max_tokens or length)
    assert windows.predictions == expected
    assert len(windows) == -(-expected // block)
    shares = [list(windows.batches(micro, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1  # otherwise a rank would wait in a collective
    tokens = np.concatenate([entry[0] for share in shares for entry in share])
    targets = np.concatenate([entry[1] for share in shares for entry in share])
    assert tokens.shape == targets.shape == (len(shares[0]) * micro * ranks, block)
    counted = targets != IGNORED
    np.testing.assert_array_equal(targets[counted], np.arange(1, expected + 1))
    np.testing.assert_array_equal(tokens[counted], np.arange(expected))
    assert (tokens[~counted] == 0).all()


def test_empty_validation_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 tokens"):
        ValidationWindows(stream_of(np.arange(1), tmp_path, 5), 4)
    with pytest.raises(UserError, match="0 predictions are requested"):
        ValidationWindows(stream_of(np.arange(9), tmp_path, 5), 4, 0)
