"""Shards of build-nanogpt and nanoGPT, read in place."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.manifest import read_manifest, verify
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.samples import Batches, ValidationWindows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.token_width import check_width
from ezpz_llm.training.data.tokenize_corpus import entropy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nanogpt_shards(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Folder in build-nanogpt's format with ids below 257, and its training and validation tokens."""
    folder = tmp_path / "edu_fineweb10B"
    folder.mkdir()
    tokens = np.random.default_rng(1).integers(0, 257, 7300).astype(np.uint16)
    for number, start in enumerate(range(0, 7300, 2000)):
        split = "val" if number == 0 else "train"
        np.save(folder / f"edufineweb_{split}_{number:06d}.npy", tokens[start:start + 2000])
    np.save(folder / "edufineweb_eval_000000.npy", tokens[:5])  # "eval" is not "val"
    return folder, tokens[2000:], tokens[:2000]


def unchanged(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


def opened_in_place(folder: Path) -> TokenData:
    """Open a folder of shards as a corpus, and check that this neither copies nor changes them."""
    before = unchanged(folder)
    check_corpus(str(folder), "bytes", 16)
    index = prepare(str(folder), "bytes", progress=False)
    assert sorted(path.name for path in index.iterdir()) == ["counts.npy", "manifest.json"]
    assert unchanged(folder) == before
    verify(index)
    return TokenData.open(index)


def test_build_nanogpt(nanogpt_shards: tuple[Path, np.ndarray, np.ndarray], cache: Path) -> None:
    folder, train, val = nanogpt_shards
    times = unchanged(folder)
    check_corpus(str(folder), "bytes", 16)
    assert not cache.exists()
    index = prepare(str(folder), "bytes", progress=False)
    assert index.parent == cache / "shards"
    assert sorted(path.name for path in index.iterdir()) == ["counts.npy", "manifest.json"]
    assert unchanged(folder) == times
    data = TokenData.open(index)
    np.testing.assert_array_equal(data.split("train")[:], train)
    np.testing.assert_array_equal(data.split("val")[:], val)
    np.testing.assert_array_equal(data.split("train")[1990:2010], train[1990:2010])
    counts = np.bincount(np.concatenate([train, val]), minlength=257)
    assert data.unigram_entropy == pytest.approx(entropy(counts))
    np.testing.assert_array_equal(np.load(index / "counts.npy"), counts)
    facts = read_manifest(index)
    assert (facts.tokens, facts.documents, facts.written_by) == (7300, counts[256], "build-nanogpt")
    first = facts.splits.train.shards[0]
    assert first.sha256 == hashlib.sha256(Path(first.file).read_bytes()).hexdigest()
    assert verify(index) == 4
    assert prepare(str(folder), "bytes", progress=False) == index
    check_corpus(str(folder), "bytes", 16)
    with pytest.raises(UserError, match="too few for one window"):
        check_corpus(str(folder), "bytes", 6000)
    # Batches and validation windows are the same as for any other stream.
    batch = Batches(data.split("train"), block_size=16, seed=1, global_batch=4, micro_batch=4, dp_rank=0, dp_size=1)
    tokens, targets = batch.micro_batches(0)[0]
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert ValidationWindows(data.split("val"), 16).predictions == 1999
    with pytest.raises(UserError, match="omit --out, --val-fraction"):
        prepare(str(folder), "bytes", val_fraction=0.2)
    # Other files, or another tokenizer, are another corpus.
    os.utime(folder / "edufineweb_train_000001.npy", ns=(1, 1))
    assert prepare(str(folder), "bytes", progress=False) != index


def test_shards_that_do_not_do(nanogpt_shards: tuple[Path, np.ndarray, np.ndarray], cache: Path) -> None:
    folder, train, _ = nanogpt_shards
    shard = folder / "edufineweb_train_000002.npy"
    whole = shard.read_bytes()

    def check_rejected(message: str, where: Path = shard) -> None:
        with pytest.raises(UserError, match=message) as caught:
            prepare(str(folder), "bytes", progress=False)
        assert str(where) in str(caught.value)
        assert list(cache.rglob("*.*")) == []

    os.truncate(shard, len(whole) - 100)
    check_rejected("this shard is truncated, or not a shard")
    shard.write_bytes(b"some text")
    check_rejected("this shard is truncated, or not a shard")
    # An empty file, an archive, a pickle; a header that is not Python text.
    header = whole[:8] + b"\xff\xff" + b"{" * 65_535
    for content in (b"", b"PK\x03\x04" + whole, pickle.dumps({}), whole[:10] + b"(" * 118 + whole[128:], header):
        shard.write_bytes(content)
        check_rejected("this shard is truncated, or not a shard")
    np.save(shard, train[:10].astype(np.float32))
    check_rejected("this shard is a 1-dimensional array of float32")
    np.save(shard, train[:10].astype(np.uint32))
    check_rejected("these shards have different data types", folder)
    bad = train[:100].copy()
    bad[70] = 300
    np.save(shard, bad)
    check_rejected("token 300 at position 70 is outside .* bytes, which has 257 tokens")
    shard.write_bytes(whole)
    index = prepare(str(folder), "bytes", progress=False)
    os.truncate(shard, len(whole) - 100)
    message = re.escape(f"has {len(whole) - 100:,} bytes; the manifest expects")
    with pytest.raises(UserError, match=message) as caught:
        TokenData.open(index)
    assert "copy that file again" in str(caught.value)
    (folder / "edufineweb_val_000000.npy").unlink()
    with pytest.raises(UserError, match="have no val split"):
        check_corpus(str(folder))


def test_nanogpt_characters(tmp_path: Path) -> None:
    """Output of nanoGPT's shakespeare_char/prepare.py; its pickled table is read without running code."""
    text = "To be, or not to be: that is the question.\n" * 40
    characters = sorted(set(text))
    ids = np.array([characters.index(character) for character in text], np.uint16)
    ids[:1500].tofile(tmp_path / "train.bin")
    ids[1500:].tofile(tmp_path / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)),
            "stoi": {character: number for number, character in enumerate(characters)}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    data = TokenData.open(prepare(str(tmp_path), progress=False))
    assert data.vocab_size == len(characters)
    assert data.tokenizer.decode(data.split("train")[:]) + data.tokenizer.decode(data.split("val")[:]) == text
    assert data.manifest.written_by == "nanoGPT"
    with pytest.raises(UserError,
                       match="these shards hold character ids, which the tokenizer bytes did not produce"):
        prepare(str(tmp_path), "bytes", progress=False)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta | {"itos": {0: "ab", 1: "c"}}))
    with pytest.raises(UserError, match="not characters in code point order"):
        prepare(str(tmp_path), progress=False)
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(UserError, match=r"there is no meta\.pkl"):
        prepare(str(tmp_path), "char", progress=False)
    np.array([1, 2, 3], np.uint8).tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match="this shard is truncated, or not a shard"):
        prepare(str(tmp_path), "bytes", progress=False)


TYPES = ["<u4", "<i4", ">u4", "<i8", "<u8", ">i8", ">u2", "u1", "<f4", "<f8"]


@pytest.mark.parametrize("dtype", TYPES)
def test_tokens_of_another_width_are_detected_and_the_advice_converts_them(tmp_path: Path, dtype: str) -> None:
    """Read as uint16 without a check, uint32 tokens would be twice as many, and every second one 0."""
    ids = np.random.default_rng(1).zipf(1.3, 6000) % 100
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(map(chr, range(32, 132))))}))
    for name, part in (("train", ids[:5000]), ("val", ids[5000:])):
        part.astype(dtype).tofile(tmp_path / f"{name}.bin")
    name = {"<f4": "look like float32", "<f8": "look like float64", "<u4": "uint32", "<i4": "uint32",
            ">u4": "big-endian uint32", ">u2": "big-endian uint16",
            ">i8": "big-endian 64-bit", "u1": "one-byte|uint8"}.get(dtype, "64-bit integers")
    for act in (check_corpus, lambda corpus: prepare(corpus, progress=False)):
        with pytest.raises(UserError, match=name) as caught:
            act(str(tmp_path))
        assert str(tmp_path / "train.bin") in str(caught.value)
    command = re.search(r"cd .*? && python3 -c \".*\"", str(caught.value))
    assert command is not None
    subprocess.run(command[0].replace("python3", sys.executable), shell=True, check=True, timeout=scaled(60))
    data = TokenData.open(prepare(str(tmp_path), progress=False))
    np.testing.assert_array_equal(data.split("train")[:], ids[:5000])
    np.testing.assert_array_equal(data.split("val")[:], ids[5000:])


DECLARED = ["uint8", "uint16", "uint32", "int32", "int64"]


@pytest.mark.parametrize("dtype", DECLARED)
@pytest.mark.parametrize("declaration", ["meta.json", "meta.pkl", "meta.pkl, NumPy"])
def test_nanogpt_shards_of_a_declared_type_are_opened_without_a_copy(
        tmp_path: Path, cache: Path, dtype: str, declaration: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    ids = (np.random.default_rng(1).zipf(1.1, 6000) % (256 if dtype == "uint8" else 257)).astype(dtype)
    ids[:5000].tofile(folder / "train.bin")
    ids[5000:].tofile(folder / "val.bin")
    if declaration == "meta.json":
        (folder / "meta.json").write_text(json.dumps({"dtype": dtype}))
    else:
        value = getattr(np, dtype) if "NumPy" in declaration else dtype
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257, "dtype": value}))
    data = opened_in_place(folder)
    assert data.manifest.dtype == dtype
    np.testing.assert_array_equal(data.split("train")[:], ids[:5000])
    np.testing.assert_array_equal(data.split("val")[:], ids[5000:])
    np.testing.assert_array_equal(data.split("train").windows(np.array([7, 4000]), 5)[1], ids[4000:4005])
    np.testing.assert_array_equal(np.load(data.folder / "counts.npy"), np.bincount(ids, minlength=257))


def test_a_wrong_declaration_is_rejected(tmp_path: Path, cache: Path) -> None:
    ids = np.random.default_rng(1).zipf(1.1, 6000) % 257
    meta = tmp_path / "meta.json"

    def check_rejected(written: str, content: object, message: str, instead: str) -> None:
        for name in ("train", "val"):
            ids.astype(written).tofile(tmp_path / f"{name}.bin")
        meta.write_text(json.dumps(content))
        for act in (check_corpus, lambda *words: prepare(*words, progress=False)):
            with pytest.raises(UserError, match=message) as caught:
                act(str(tmp_path), "bytes")
            assert instead in str(caught.value.instead)
        assert list(cache.rglob("*.*")) == []

    check_rejected("<u4", {}, "look like uint32 or int32, not uint16",
                   f"declare it: echo '{{\"dtype\": \"uint32\"}}' > {tmp_path}/meta.json; or convert them: cd")
    check_rejected("<i8", {"dtype": "uint32"}, "look like 64-bit integers, not uint32", '"int64"')
    check_rejected("<u4", {"dtype": "uint16"}, "look like uint32 or int32, not uint16", '"uint32"')
    check_rejected("<u2", {"dtype": "uint32"}, "outside the vocabulary",
                   """since all tokens fit as uint16, declare it: echo '{"dtype": "uint16"}' > """)
    for wrong in ("float32", ">u4", "uint64", 4, ["uint32"]):
        check_rejected("<u4", {"dtype": wrong}, "token type .* is not supported", "uint32, int32, int64")
    ids[70] = -5
    check_rejected("<i4", {"dtype": "int32"}, "token -5 at position 70 is outside", "--tokenizer T")


def test_declared_characters(tmp_path: Path) -> None:
    """A type can be declared beside nanoGPT's table; a table without "char" tokens is no default for char."""
    ids = np.arange(200) % 3
    for name in ("train", "val"):
        ids.astype("<i8").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a", 1: "b", 2: "c"}, "dtype": "int64"}))
    data = TokenData.open(prepare(str(tmp_path), "char", progress=False))
    assert data.tokenizer.decode(data.split("train")[:4]) == "abca"
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"dtype": "int64"}))
    with pytest.raises(UserError, match=r"--tokenizer char needs a table of characters"):
        prepare(str(tmp_path), "char", progress=False)


@pytest.mark.parametrize("names", [("x_train_000001.npy", "x_val_000000.npy"), ("x_train.bin", "x_val.bin"),
                                   ("train.bin", "val.bin")])
def test_shards_that_state_their_type_ignore_declared_types(tmp_path: Path, names: tuple[str, str]) -> None:
    """A meta.json, or a meta.pkl without characters, may belong to another program."""
    ids = np.arange(200, dtype=np.uint16)
    for name in names:
        if name.endswith(".npy"):
            np.save(tmp_path / name, ids)
        else:
            write_llm_c(tmp_path / name, ids)
    for declared in ({"dtype": "torch.bfloat16"}, {"dtype": "uint32"}):
        (tmp_path / "meta.json").write_text(json.dumps(declared))
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(declared))
        check_corpus(str(tmp_path), "bytes")
        data = TokenData.open(prepare(str(tmp_path), "bytes", progress=False))
        np.testing.assert_array_equal(data.split("train")[:], ids)
    (tmp_path / "meta.json").write_text("not JSON")
    check_corpus(str(tmp_path), "bytes")
    # Converting nanoGPT's characters to .npy files leaves their table in the folder.
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(map(chr, range(32, 232))))}))
    assert TokenData.open(prepare(str(tmp_path), progress=False)).manifest.tokenizer.name == "char"


@pytest.mark.parametrize("content", [{"vocab_size": 257}, {"vocab_size": 257, "dtype": "torch.uint32"}])
def test_a_type_declared_in_meta_json_needs_no_characters(tmp_path: Path, content: dict[str, object]) -> None:
    ids = (np.random.default_rng(1).zipf(1.1, 6000) % 257).astype("<u4")
    for name in ("train", "val"):
        ids.tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint32"}))
    check_corpus(str(tmp_path), "bytes")
    data = TokenData.open(prepare(str(tmp_path), "bytes", progress=False))
    np.testing.assert_array_equal(data.split("val")[:], ids)


@pytest.mark.parametrize("content", [{"dtype": np.dtype("uint16")}, {"vocab_size": 257}])
def test_advice_for_a_meta_pkl_without_characters_declares_the_type(
        tmp_path: Path, content: dict[str, object]) -> None:
    folder = tmp_path / "my shards"
    folder.mkdir()
    for name in ("train", "val"):
        np.arange(200, dtype=np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="no usable table of characters") as caught:
        check_corpus(str(folder), "bytes")
    command = re.search(r"remove meta\.pkl and declare their type, such as uint16: (echo .*)", str(caught.value))
    assert command is not None
    (folder / "meta.pkl").unlink()
    subprocess.run(command[1], shell=True, check=True, timeout=scaled(60))
    assert json.loads((folder / "meta.json").read_text()) == {"dtype": "uint16"}
    check_corpus(str(folder), "bytes")


def write_llm_c(path: Path, ids: np.ndarray, version: int = 1) -> None:
    magic = 20240520 if ids.dtype == np.uint16 else 20240801
    path.write_bytes(np.array([magic, version, ids.size], "<i4").tobytes() + bytes(1012) + ids.tobytes())


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("names", [("x_train_000001", "x_train_000002", "x_val_000000"),
                                   ("tiny_train", "tiny_val"), ("train", "val")])
def test_llm_c_shards_are_opened_without_a_copy(tmp_path: Path, cache: Path, dtype: str,
                                                names: tuple[str, ...]) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    ids = np.random.default_rng(1).integers(0, 257, 4000).astype(dtype)
    for name, part in zip(names, np.array_split(ids, len(names)), strict=True):
        write_llm_c(folder / f"{name}.bin", part)
    data = opened_in_place(folder)
    assert data.manifest.dtype == dtype
    np.testing.assert_array_equal(np.concatenate([data.split("train")[:], data.split("val")[:]]), ids)


def test_damaged_llm_c_shards_are_rejected(tmp_path: Path, cache: Path) -> None:
    ids = np.arange(100, dtype=np.uint16)
    write_llm_c(tmp_path / "x_val.bin", ids)

    def check_rejected(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            prepare(str(tmp_path), "bytes", progress=False)
        assert str(tmp_path / "x_train.bin") in str(caught.value)
        assert list(cache.rglob("*.*")) == []

    write_llm_c(tmp_path / "x_train.bin", ids, version=2)
    check_rejected("version 2; only version 1 is supported")
    write_llm_c(tmp_path / "x_train.bin", ids[:0])
    check_rejected("0 tokens according to its header")
    write_llm_c(tmp_path / "x_train.bin", ids)
    os.truncate(tmp_path / "x_train.bin", 1024 + 198)
    check_rejected("has 1,222 bytes, but 100 tokens according to its header, which need 1,224")
    os.truncate(tmp_path / "x_train.bin", 5)
    check_rejected("has 5 bytes, but 0 tokens")
    (tmp_path / "x_train.bin").unlink()
    with pytest.raises(UserError, match=r"these llm\.c shards have no train split"):
        prepare(str(tmp_path), "bytes", progress=False)


@pytest.mark.parametrize("names", [("train.bin", "val.bin"), ("x_train_000000.npy", "x_val_000000.npy"),
                                   ("m.bin", "m.idx")])
def test_git_lfs_pointers_are_rejected(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with pytest.raises(UserError, match="is a Git LFS pointer") as caught:
        check_corpus(str(tmp_path / "m" if "m.idx" in names else tmp_path), "bytes")
    assert "git lfs pull" in str(caught.value)


def test_text_named_train_bin_is_rejected(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(UserError, match="looks like text"):
        check_corpus(str(tmp_path), "bytes")


def test_a_vocabulary_beyond_16_bits_is_recognized(tmp_path: Path) -> None:
    (np.random.default_rng(1).zipf(1.1, 60) % 151_936).astype("<u4").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"look like uint32 or int32, not uint16: .* would be at most 2"):
        check_width(tmp_path / "train.bin", np.dtype("<u2"))


@pytest.mark.parametrize("ids", [
    np.random.default_rng(2).zipf(1.1, 40_000) % 50_257, np.zeros(9000), np.arange(9000) % 7,
    np.random.default_rng(2).integers(0, 2, 9000), np.frombuffer(b"plain text, and more of it\n" * 99, np.uint8),
    np.r_[0, np.arange(257)], np.array([5, 0] * 9), np.tile([1, 7, 1, 9, 1, 8], 999)])
def test_true_uint16_tokens_are_accepted(tmp_path: Path, ids: np.ndarray) -> None:
    for name in ("train", "val"):
        ids.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
        check_width(tmp_path / f"{name}.bin", np.dtype("<u2"))


def test_narrow_tokens_behind_a_header_that_says_uint32(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 257, 4000).astype(np.uint16)
    for name in ("train", "val"):
        np.save(tmp_path / f"x_{name}_000000.npy", ids.view(np.uint32))
    with pytest.raises(UserError, match="since all tokens fit as uint16"):
        check_corpus(str(tmp_path), "bytes")


def test_advice_converts_integer_arrays_of_other_types(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 257, (40, 100))
    for name in ("train", "val"):
        np.save(tmp_path / f"x_{name}_000000.npy", ids)
    with pytest.raises(UserError, match="this shard is a 2-dimensional array of int64") as caught:
        check_corpus(str(tmp_path), "bytes")
    command = re.search(r"mkdir .* && python3 -c \".*?\"", str(caught.value))
    assert command is not None
    subprocess.run(command[0].replace("python3", sys.executable), shell=True, check=True, timeout=scaled(60))
    data = TokenData.open(prepare(str(tmp_path / "u4"), "bytes", progress=False))
    np.testing.assert_array_equal(data.split("train")[:], ids.ravel())


def test_ids_beyond_the_vocabulary_are_found_before_writing(
        nanogpt_shards: tuple[Path, np.ndarray, np.ndarray], cache: Path) -> None:
    folder, train, _ = nanogpt_shards
    train[1999] = 300
    np.save(folder / "edufineweb_train_000001.npy", train[:2000])
    with pytest.raises(UserError, match=r"token 300 at position 1,999 .* bytes, which has 257 tokens"):
        check_corpus(str(folder), "bytes")
    assert not cache.exists()


class Runs:
    """Object whose unpickling runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-here",)


def test_meta_pkl_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.bin", "val.bin"):
        np.array([0, 1, 2], np.uint16).tofile(tmp_path / name)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Runs()}))
    with pytest.raises(UserError, match=r"it imports .*\.system"):
        prepare(str(tmp_path), progress=False)
    assert not (tmp_path / "was-here").exists()


_NESTED_TUPLES = b")" + b"\x85" * 1_000_000


@pytest.mark.parametrize(("pickled", "problem"), [
    (b"\x80\x04}" + _NESTED_TUPLES + b"Ns.", "it has too many parts"),
    (b"\x80\x04}\x8c\x04itos(l" + _NESTED_TUPLES + b"as.", "it has too many parts"),
    (b"\x80\x04}r\xff\xff\xff\x7f.", "it has the opcode LONG_BINPUT"),
    (b"\x80\x04}\x8a\x09" + (3 * (2**61 - 1)).to_bytes(9, "little") + b"Ns.", "it has the opcode LONG1"),
    (b"\x80\x04" + b"}" * 2_000_000 + b".", "it has too many parts")])
def test_meta_pkl_cannot_exhaust_the_process(tmp_path: Path, pickled: bytes, problem: str) -> None:
    """Python's hash of nested tuples overflows the stack, and a large memo index allocates 32 GB."""
    (tmp_path / "meta.pkl").write_bytes(pickled)
    program = ("from pathlib import Path; from ezpz_llm.training.data.nanogpt_meta import read_meta; "
               "read_meta(Path(), is_raw=True)")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert (done.returncode, problem in done.stderr) == (1, True), done.stderr


@pytest.mark.full
def test_ten_billion_tokens_in_a_hundred_shards(tmp_path: Path) -> None:
    """Open 20 GB of (sparse) shards and read a thousand samples, without using memory for them."""
    program = """
import resource, sys
from pathlib import Path
import numpy as np
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.data.shards import TokenStream
folder, shard = Path(sys.argv[1]), 100_000_000
paths = [folder / f"{number}.bin" for number in range(100)]
for path in paths:
    path.touch()
    with path.open("r+b") as file:
        file.truncate(2 * shard)
stream = TokenStream([(path, shard) for path in paths], np.dtype("<u2"), "sparse shards")
assert len(stream) == 10**10
batches = Batches(stream, block_size=1024, seed=1, global_batch=64, micro_batch=64, dp_rank=0, dp_size=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(16):
    batches.micro_batches(64 * step)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    process = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True,
                             timeout=scaled(120))
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 64 * 1024  # kB


@pytest.mark.parametrize("entry", [{"tokens": 10**9}, {"offset": 10**9}, {"tokens": 5, "offset": 8}])
def test_shard_that_ends_beyond_its_file_is_rejected(tmp_path: Path, entry: dict[str, int]) -> None:
    """The file has the expected size, but the tokens extend beyond it."""
    (tmp_path / "train_000000.bin").write_bytes(bytes(16))
    shard = {"file": "train_000000.bin", "tokens": 8, "sha256": "0" * 64, "file_bytes": 16, **entry}
    split = {"tokens": 8, "shards": [shard]}
    (tmp_path / "manifest.json").write_text(json.dumps({
        "format": "ezpz_llm tokens 1", "request": "r", "command": "c", "documents": 1, "tokens": 16,
        "source": {"corpus": "x", "files": 1, "bytes": 16}, "vocab_size": 257, "end_of_text": 256,
        "tokenizer": {"name": "bytes", "fingerprint": "f"}, "dtype": "uint16", "unigram_entropy": 1.0,
        "splits": {"train": split, "val": split}}))
    with pytest.raises(UserError, match=r"ends at byte .* of a file of 16 bytes"):
        TokenData.open(tmp_path).split("train")
