"""Mixtures of corpora: exact shares, and samples that are a pure function of (seed, i)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.manifest import verify
from ezpz_llm.training.data.mixture import find_mixture
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.sample_order import draw_streams
from ezpz_llm.training.data.samples import IGNORED, Batches, ValidationWindows, sample_windows, stream_offsets
from ezpz_llm.training.data.shards import BLOCK, Mixture, TokenData, TokenStream, samples_per_block
from ezpz_llm.training.data.tokenize_corpus import entropy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_shares_add_up_and_are_the_nearest(weights: list[float]) -> None:
    names = [str(weight) for weight in weights]
    if min(weights) / sum(weights) * BLOCK < 1:
        with pytest.raises(UserError, match="the minimum is 1 in 4096"):
            samples_per_block(names, weights)
        return
    counts = samples_per_block(names, weights)
    assert sum(counts) == BLOCK
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    assert all(abs(count - value) < 1 for count, value in zip(counts, exact, strict=True))


@given(weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4), seed=st.integers(0, 2**64 - 1),
       block=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_each_sample_of_each_stream_comes_once(weights: list[float], seed: int, block: int) -> None:
    """Each block has each stream's share of its next samples; computing one index alone gives the same sample."""
    counts = samples_per_block([str(weight) for weight in weights], weights)
    streams, indices = draw_streams(counts, seed, np.arange(block * BLOCK, (block + 1) * BLOCK))
    for part, count in enumerate(counts):
        np.testing.assert_array_equal(np.sort(indices[streams == part]),
                                      np.arange(block * count, (block + 1) * count))
    single_stream, single_index = draw_streams(counts, seed, np.array([block * BLOCK + 77]))
    assert (single_stream[0], single_index[0]) == (streams[77], indices[77])


def test_streams_are_interleaved_and_seeds_differ() -> None:
    counts = samples_per_block(["a", "b"], [0.7, 0.3])
    streams, _ = draw_streams(counts, 1, np.arange(20 * BLOCK))
    assert counts == (2867, 1229)
    for stretch in np.split(streams, 80):
        assert 0.24 < stretch.mean() < 0.36  # not one stream after the other
    assert not np.array_equal(streams[:BLOCK], streams[BLOCK:2 * BLOCK])
    assert not np.array_equal(streams[:BLOCK], draw_streams(counts, 2, np.arange(BLOCK))[0])


def stream_of(first: int, length: int, path: Path) -> TokenStream:
    path.write_bytes(np.arange(first, first + length, dtype="<u2").tobytes())
    return TokenStream([(path, length)], np.dtype("<u2"), path.name)


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    """Two streams whose tokens encode their positions: 0 to 5000, and from 10,000 on."""
    streams = stream_of(0, 5000, tmp_path / "a.bin"), stream_of(10_000, 1700, tmp_path / "b.bin")
    return Mixture(streams, (3072, 1024))


def test_streams_of_one_length_have_orders_of_their_own(tmp_path: Path) -> None:
    """Streams with a common order would always have the same positions of two texts in a batch."""
    halves = Mixture(tuple(stream_of(0, 5000, tmp_path / name) for name in "ab"), (BLOCK // 2, BLOCK // 2))
    samples = np.arange(BLOCK)
    streams, indices = draw_streams(halves.counts, 3, samples)
    _, starts = stream_offsets(halves, 16, 3, samples)
    first, second = (starts[streams == part][np.argsort(indices[streams == part])] for part in (0, 1))
    assert (first == second).mean() < 0.01


def test_a_step_is_the_same_for_any_ranks_and_position(mixture: Mixture) -> None:
    def step(consumed: int, dp_size: int, micro: int, batch: int = 24) -> np.ndarray:
        firsts = []
        for rank in range(dp_size):
            batches = Batches(mixture, block_size=16, seed=3, global_batch=batch, micro_batch=micro, dp_rank=rank,
                              dp_size=dp_size)
            for tokens, targets in batches.micro_batches(consumed):
                np.testing.assert_array_equal(targets, tokens + 1)
                firsts.append(tokens[:, 0])
        return np.concatenate(firsts)

    for consumed in (0, 4090, 70_000):
        expected = step(consumed, 1, 24)
        for dp_size, micro in ((2, 6), (3, 4), (24, 1)):
            np.testing.assert_array_equal(step(consumed, dp_size, micro), expected)
        divided = np.concatenate([step(consumed, 1, 8, 8), step(consumed + 8, 2, 8, 16)])
        np.testing.assert_array_equal(divided, expected)
    # In 20 blocks, each stream has its share, in its own windows and epochs.
    starts = np.concatenate([step(first, 1, 512, 512) for first in range(0, 20 * BLOCK, 512)])
    assert (starts >= 10_000).mean() == 0.25
    _, often = np.unique(starts[starts >= 10_000], return_counts=True)
    assert often.max() < 3 * 20 * 1024 / 1700
    np.testing.assert_array_equal(np.sort(starts[:BLOCK][starts[:BLOCK] < 10_000]),
                                  np.sort(sample_windows(5000, 16, 3, np.arange(3072))))


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, (4999, 1699)), (1000, (750, 250)), (4, (3, 1))])
@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (3, 2), (5, 4)])
def test_validation_uses_each_streams_share(mixture: Mixture, max_tokens: int | None, expected: tuple[int, int],
                                                   micro: int, ranks: int) -> None:
    windows = ValidationWindows(mixture, 16, max_tokens)
    assert windows.predictions == sum(expected)
    batches = [entry for rank in range(ranks) for entry in windows.batches(micro, rank, ranks)]
    targets = np.concatenate([entry[1] for entry in batches])
    tokens = np.concatenate([entry[0] for entry in batches])
    counted = targets != IGNORED
    expected_targets = [*range(1, expected[0] + 1), *range(10_001, 10_001 + expected[1])]
    np.testing.assert_array_equal(targets[counted], expected_targets)
    np.testing.assert_array_equal(tokens[counted] + 1, targets[counted])


def test_a_mixture_is_named_by_its_parts(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of text\n" * 500)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"{number}"}) + "\n" for number in range(2000)))
    corpus = f"{tmp_path / 'a.txt'}=0.7, {tmp_path / 'b.jsonl'}=0.3"
    check_corpus(corpus)
    folder = prepare(corpus, progress=False)
    assert prepare(corpus, progress=False) == folder
    check_corpus(corpus, None, 64)
    check_corpus(str(folder), "bytes", 64)
    data = TokenData.open(folder)
    parts = [TokenData.open(prepare(str(tmp_path / name), progress=False)) for name in ("a.txt", "b.jsonl")]
    assert data.split("train").counts == (2867, 1229)
    assert data.manifest.documents == 2001
    assert len(data.split("train")) == sum(len(part.split("train")) for part in parts)
    shared = [np.bincount(np.concatenate([part.split("train")[:], part.split("val")[:]]), minlength=257)
              for part in parts]
    mean = sum(count / count.sum() * weight / 4096 for count, weight in zip(shared, (2867, 1229), strict=True))
    assert data.unigram_entropy == pytest.approx(entropy(mean))
    assert data.fingerprint not in (parts[0].fingerprint, parts[1].fingerprint)
    reweighted = prepare(corpus.replace("0.7", "0.8"), progress=False)
    assert TokenData.open(reweighted).fingerprint != data.fingerprint
    np.testing.assert_array_equal(data.first_tokens(3), parts[0].split("train")[:3])
    assert data.tokenizer.name == "bytes"


def test_invalid_mixtures(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of text\n" * 500)
    (tmp_path / "b.txt").write_text("other words\n" * 500)
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    chars = prepare(str(a), "char", progress=False)
    mixed = prepare(f"{a}=1,{b}=1", progress=False)
    for corpus, tokenizer, message in [
        (f"{a}=0.7,{a}=0.3", None, "is given more than once"),
        (f"{a}=1,{tmp_path / 'x' / '..' / 'a.txt'}=1", None, "is given more than once"),
        (f"{a}=1,{b}=0.0001", None, "the minimum is 1 in 4096"),
        (f"{a}=1,{tmp_path / 'c.txt'}=1", None, "no such corpus file or folder"),
        (f"{a}=1,{b}=1", "char", "must have the same tokenizer; these have two different char tables"),
        (f"{chars}=1,{b}=1", None, "must have the same tokenizer; these have char and bytes"),
        (f"{mixed}=1,{b}=1", None, "a mixture cannot be part of another"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(corpus, tokenizer, progress=False)
    # A mixture as a part could contain itself.
    stored = json.loads((mixed / "manifest.json").read_text())
    (mixed / "manifest.json").write_text(json.dumps(stored | {"parts": [{"folder": str(mixed), "weight": 1}]}))
    for open_folder in (TokenData.open, verify):
        with pytest.raises(UserError, match="a mixture cannot be part of another"):
            open_folder(mixed)
    np.save(prepare(str(b), progress=False) / "counts.npy", np.ones(3, np.int64))
    with pytest.raises(UserError, match=r"these counts are int64 \(3,\); expected int64 \(257,\)"):
        prepare(f"{a}=1,{b}=2", progress=False)
    with pytest.raises(UserError, match="omit --out"):
        prepare(f"{a}=1,{b}=1", out=tmp_path / "out", progress=False)


@pytest.mark.parametrize(("corpus", "message", "instead"), [
    ("a.txt=0.7,b.txt", "b.txt has no weight", "--corpus a.txt=0.7,b.txt=0.3"),
    ("a.txt,b.txt", "a.txt has no weight; b.txt has no weight", "--corpus a.txt=0.5,b.txt=0.5"),
    ("stdlib,b.txt=3", "stdlib has no weight", "--corpus stdlib=1,b.txt=3"),
    ("a.txt=0.7,b.txt=", "the weight of b.txt is '', not a number above 0", "a.txt=0.7,b.txt=0.3"),
    ("a.txt=1,b.txt=0", "the weight of b.txt is '0', not a number above 0", "a.txt=1,b.txt=1"),
    ("a.txt=-1,b.txt=1", "the weight of a.txt is '-1', not", "a.txt=1,b.txt=1"),
    ("a.txt=0.5,b.txt=O.5", "the weight of b.txt is 'O.5', not", "a.txt=0.5,b.txt=0.5"),
    ("a.txt=1,b.txt=1.2.3", "the weight of b.txt is '1.2.3'", "b.txt=1"),
    ("a.txt=nan,b.txt=inf", "the weight of a.txt is 'nan'", "a.txt=0.5,b.txt=0.5"),
    ("a.txt=0.7,b.txt=0.3,", "a part has no name; is there an extra comma?", "--corpus a.txt=0.7,b.txt=0.3"),
    ("a.txt=0.7,,b.txt=0.3", "a part has no name", "--corpus a.txt=0.7,b.txt=0.3"),
    ("a.txt=0.7,=0.3", "the weight 0.3 has no corpus before it", "--corpus a.txt, or several"),
    ("=1,=2", "the weight 1 has no corpus before it; the weight 2 has no corpus before it", "--corpus A=0.7,B=0.3"),
    ("a.txt=0.5,a.txt=0.5", "a.txt is given more than once", "list each corpus once"),
    ("a.txt=0.7", "a single corpus cannot have a weight", "--corpus a.txt"),
    ("a.txt,", "a part has no name", "--corpus a.txt"),
    ("lr=0.1,a.txt=1", "lr=0.1 has no weight", "--corpus lr=0.1=1,a.txt=1"),
    ("m=0.5,a.txt", "a.txt has no weight", "--corpus m=0.5,a.txt=0.5"),  # Megatron's m.bin and m.idx
    ("a.txt=0.5,no,such.txt=0.5", "no has no weight", "ln -s PATH NAME"),
    *((words, "in the notation of another program", "--corpus a.txt=0.7,b.txt=0.3") for words in (
        "0.7,a.txt,0.3,b.txt", "0.7 a.txt 0.3 b.txt", "a.txt,0.7,b.txt,0.3", "a.txt:0.7,b.txt:0.3",
        "0.7*a.txt,0.3*b.txt", "a.txt:0.7 b.txt:0.3", "a.txt=70%,b.txt=30%", "70%,a.txt,30%,b.txt",
        "a.txt:70%; b.txt:30%", "a.txt=0.7;b.txt=0.3", "a.txt=0.7 b.txt=0.3", "0.7*a.txt + 0.3*b.txt",
        "a.txt(0.7),b.txt(0.3)", '{"a.txt": 0.7, "b.txt": 0.3}', "0.7=a.txt,0.3=b.txt", "a.txt:7e-1,b.txt:3e-1",
        "a.txt,b.txt:0.3")),
    *((words, "in the notation of another program", "--corpus a.txt=0.5,b.txt=0.5") for words in (
        "a.txt b.txt", "a.txt+b.txt", "a.txt;b.txt")),
    ("sp ace.txt:0.7,b.txt:0.3", "in the notation of another program", "--corpus sp ace.txt=0.7,b.txt=0.3"),
    ("a.txt:0.7", "in the notation of another program", "--corpus a.txt, or several as A=0.7,B=0.3"),
])
def test_mistyped_mixture_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, message: str,
                                         instead: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "sp ace.txt", "lr=0.1", "m.idx"):
        (tmp_path / name).write_text("some words of text\n" * 500)
    for act in (check_corpus, lambda corpus: prepare(corpus, progress=False)):
        with pytest.raises(UserError) as caught:
            act(corpus)
        assert message in caught.value.found
        assert instead in caught.value.instead
        assert caught.value.where == f"--corpus {corpus}"


def test_paths_with_commas_and_equals_signs_are_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b,c,d.txt", "lr=0.1,x=2.txt", "e=5"):
        (tmp_path / name).write_text("some words of text\n" * 500)
    corpus = "a.txt=1e-1, b,c,d.txt=2,lr=0.1,x=2.txt=3,e=5=.5"
    assert find_mixture(corpus) == [("a.txt", 0.1), ("b,c,d.txt", 2.0), ("lr=0.1,x=2.txt", 3.0), ("e=5", 0.5)]
    assert len(TokenData.open(prepare(corpus, progress=False)).parts) == 4
    monkeypatch.setenv("HOME", str(tmp_path))
    for corpus in ("b,c,d.txt", "e=5", "~/b,c,d.txt", "~/e=5", "no,such.txt", "no=such.txt", "run=3/no.txt"):
        assert find_mixture(corpus) is None
