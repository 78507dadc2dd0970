"""Megatron's .bin and .idx: read in place, with documents; mismatches are user errors."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from megatron_files import write_megatron
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data import megatron
from ezpz_llm.training.data.document_lookup import find_extracts
from ezpz_llm.training.data.manifest import read_manifest, verify
from ezpz_llm.training.data.megatron import read_index
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.data.shards import TokenData


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


def documents(count: int, seed: int = 1, min_tokens: int = 1) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, draw.integers(min_tokens, 60)) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_tokens_are_read_in_place(tmp_path: Path, dtype: str) -> None:
    texts = documents(500)
    prefix = write_megatron(tmp_path / "my_text_document", texts, dtype)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("my_*")}
    folders = {prepare(str(tmp_path / name), "bytes", progress=False)
               for name in ("my_text_document", "my_text_document.bin", "my_text_document.idx")}
    folder, = folders
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("my_*")} == times
    assert not list(folder.glob("*.bin"))
    data, whole = TokenData.open(folder), np.concatenate(texts)
    train, val = data.split("train"), data.split("val")
    np.testing.assert_array_equal(np.concatenate([train[:], val[:]]), whole)
    starts = np.cumsum([0, *map(len, texts)])
    np.testing.assert_array_equal(read_index(prefix.with_suffix(".bin"), prefix.with_suffix(".idx")).starts, starts)
    # Validation starts with the first document in the last 2 %.
    assert len(train) == starts[np.searchsorted(starts, int(whole.size * 0.98))]
    assert (data.manifest.documents, data.manifest.tokens) == (500, whole.size)
    assert verify(folder) == 2


@pytest.mark.parametrize("sizes", [[3000, 7000], [100, 9890, 10], [9500, 499, 1]])
def test_a_long_document_does_not_move_the_validation_split_far(tmp_path: Path, sizes: list[int],
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path / "a", [np.zeros(size, int) for size in sizes], "uint16")
    data = TokenData.open(prepare(str(tmp_path / "a"), "bytes"))
    assert len(data.split("val")) == 200
    assert "note: the validation split, the last 2 % of the tokens, begins within a" in capsys.readouterr().err


def test_a_document_of_several_sequences_and_an_empty_one(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", [np.arange(5), np.arange(3), np.arange(0), np.arange(7)], "uint16",
                            ends=[0, 2, 3, 4])
    index = read_index(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
    assert index.starts.tolist() == [0, 8, 8, 15]


@pytest.mark.parametrize("at_once", [1, 3, 7, 1000])
def test_index_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(megatron, "_AT_ONCE", at_once)
    texts = documents(50)
    prefix = write_megatron(tmp_path / "a", texts, "uint16")
    index = read_index(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
    assert index.starts.tolist() == [0, *np.cumsum([text.size for text in texts])]
    whole = prefix.with_suffix(".idx").read_bytes()
    last = 34 + 4 * 49
    prefix.with_suffix(".idx").write_bytes(whole[:last] + struct.pack("<i", texts[-1].size + 1) + whole[last + 4:])
    with pytest.raises(UserError, match="the index describes"):
        read_index(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))


def test_huge_index_without_tokens_is_rejected_without_reading_it(tmp_path: Path) -> None:
    """A sparse file of zeros is a consistent index of 10^9 empty sequences."""
    prefix = write_megatron(tmp_path / "a", documents(5), "uint16")
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 10**9, 2))
        file.truncate(34 + 12 * 10**9 + 8)
        file.seek(0, 2)
        file.write(struct.pack("<q", 10**9))
    began = time.process_time()
    with pytest.raises(UserError, match="has 1,000,000,000 sequences and 2 document ends, more than the"):
        read_index(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
    assert time.process_time() - began < scaled(1)


def test_mixture_of_token_types(tmp_path: Path) -> None:
    """Parts of a mixture may have different token types."""
    for name, dtype, shift in (("a", "uint16", 0), ("b", "int32", 100)):
        write_megatron(tmp_path / name, [text % 100 + shift for text in documents(400)], dtype)
    folder = prepare(f"{tmp_path / 'a'}=0.75,{tmp_path / 'b'}=0.25", "bytes", progress=False)
    batches = Batches(TokenData.open(folder).split("train"), block_size=16, seed=3, global_batch=4096,
                      micro_batch=4096, dp_rank=0, dp_size=1)
    (tokens, _), = batches.micro_batches(0)
    from_b = (tokens >= 100).all(axis=1)
    assert from_b.sum() == 1024
    assert (tokens[~from_b] < 100).all()


def test_index_that_does_not_match_is_a_user_error(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", documents(50), "uint16")
    idx, tokens = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
    whole, content = idx.read_bytes(), tokens.read_bytes()

    def check_rejected(index: bytes, message: str, token_bytes: bytes = content) -> None:
        idx.write_bytes(index)
        tokens.write_bytes(token_bytes)
        for corpus in (str(prefix), str(idx)):
            with pytest.raises(UserError, match=message) as caught:
                check_corpus(corpus, "bytes")
            assert caught.value.where == str(idx)
            assert caught.value.instead

    check_rejected(b"TNTIDX\0\0\0" + whole[9:], "not a Megatron index")
    check_rejected(whole[:20], "truncated: it has 20 bytes")
    check_rejected(b"", "truncated: it has 0 bytes")
    check_rejected(whole[:-1], "this index is truncated: ")
    check_rejected(whole + b"0" * 51, "this index is too long: ")
    check_rejected(whole[:9] + struct.pack("<Q", 2) + whole[17:], "version 2")
    check_rejected(whole[:17] + b"\x06" + whole[18:], "the token type 6 is not supported")
    check_rejected(whole[:17] + b"\x04" + whole[18:], "are not contiguous")
    check_rejected(whole[:-8] + struct.pack("<q", 49), "do not contain all sequences")
    check_rejected(whole, r"the index describes [\d,]+ bytes of tokens \(uint16\); a.bin has [\d,]+", content[:-2])
    check_rejected(whole[:34] + struct.pack("<i", -3) + whole[38:], "sequence 0 has -3 tokens")
    idx.write_bytes(whole)
    tokens.unlink()
    with pytest.raises(UserError, match="has no tokens beside it"):
        check_corpus(str(idx), "bytes")
    assert not (tmp_path / "cache").exists()


def test_tokenizer_is_required_and_must_have_every_token(tmp_path: Path) -> None:
    """Sampled ids are checked during preparation, the others when they are read."""
    texts = [np.resize(text, 500) for text in documents(3000)]
    prefix = write_megatron(tmp_path / "a", texts, "int32")
    for tokenizer in (None, "char"):
        with pytest.raises(UserError, match="do not record the tokenizer that made them"):
            prepare(str(prefix), tokenizer, progress=False)
    folder = prepare(str(prefix), "gpt2", progress=False)  # gpt2's file is not needed to read tokens
    assert read_manifest(folder).vocab_size == 50_257
    texts[0][3] = 300
    write_megatron(prefix, texts, "int32")
    with pytest.raises(UserError, match=r"token 300 at position 3 is outside .*, which has 257 tokens"):
        prepare(str(prefix), "bytes", progress=False)
    assert not list((tmp_path / "cache").rglob("*partial*"))
    texts[0][3] = 30
    for bad in (257, -1):
        texts[700][4] = bad
        write_megatron(prefix, texts, "int32")
        stream = TokenData.open(prepare(str(prefix), "bytes", progress=False)).split("train")
        place = sum(map(len, texts[:700])) + 4
        assert stream[:place].max() < 257
        with pytest.raises(UserError, match=f"token {bad} at position {place:,} is .*, which has 257 tokens"):
            stream[place - 5:place + 5]


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "\0", "\ud800", "gone", "", "/dev/zero"])
def test_manifest_with_invalid_file_names_is_a_user_error(tmp_path: Path, name: str) -> None:
    """File names in a manifest of another program's shards may be invalid paths."""
    prefix = write_megatron(tmp_path / "a", documents(50), "uint16")
    folder = prepare(str(prefix), "bytes", progress=False)
    whole = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(whole | {"document_index": name}))
    data = TokenData.open(folder)
    with pytest.raises(UserError, match="this Megatron file is missing"):
        find_extracts(data, block_size=8, seed=1, samples=[0])
    whole["splits"]["val"]["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(whole))
    for open_folder in (TokenData.open, verify):
        with pytest.raises(UserError, match="is missing; the manifest expects"):
            open_folder(folder)


@pytest.mark.full
def test_a_gigabyte_opens_in_under_a_second(tmp_path: Path) -> None:
    prefix = tmp_path / "large"
    lengths = np.full(1_000_000, 500, "<i4")
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, lengths.size, lengths.size + 1))
        for part in (lengths, np.arange(lengths.size) * 1000, np.arange(lengths.size + 1)):
            file.write(part.tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        block = np.random.default_rng(1).integers(0, 257, 5_000_000).astype("<u2").tobytes()
        for _ in range(100):
            file.write(block)
    began = time.process_time()  # not affected by other processes on the machine
    data = TokenData.open(prepare(str(prefix), "bytes", progress=False))
    sample = data.split("train")[123_456_789:123_456_799]
    took = time.process_time() - began
    assert (len(sample), data.manifest.documents) == (10, 1_000_000)
    assert took < scaled(1)
