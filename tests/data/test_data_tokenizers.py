"""Tokenizers: round trips, "<|endoftext|>" within a text, fingerprints, and gpt2's file."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from places import vocab_bpe

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.text import find_cut
from ezpz_llm.training.data.tokenize_corpus import pack, token_dtype
from ezpz_llm.training.data.tokenizers import (
    GPT2_FINGERPRINT,
    GPT2_NAMES,
    GPT2_VOCAB,
    CharTokenizer,
    EncodingTokenizer,
    from_entry,
    get_tokenizer,
    install_gpt2,
    read_merges,
    to_entry,
)

GPT2_TEXT = "Hello, I'm a language model,"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    np.testing.assert_array_equal(ids, list(text.encode()))
    assert tokenizer.decode(ids) == text


def test_bytes() -> None:
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("a<|endoftext|>b").max() < 256
    assert tokenizer.decode(np.array([65, 256, 66])) == "A<|endoftext|>B"
    assert tokenizer.decode(np.array([0xFF, 65])) == "�A"
    np.testing.assert_array_equal(tokenizer.encode("\ud800"), list("�".encode()))
    assert tokenizer.encode("").size == 0


def test_characters() -> None:
    tokenizer = CharTokenizer("\n abé😀")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (6, None)
    np.testing.assert_array_equal(tokenizer.encode("aé😀\n b"), [2, 4, 5, 0, 1, 3])
    assert tokenizer.decode(np.array([2, 4, 5, 0])) == "aé😀\n"
    with pytest.raises(UserError, match=r"'c' \(U\+0063\): not among the 6 characters"):
        tokenizer.encode("abca")
    with pytest.raises(UserError, match="U\\+1F601"):  # beyond the last character of the table
        tokenizer.encode("a😁")
    assert from_entry(to_entry(tokenizer)).decode(np.array([5])) == "😀"


def test_tokenizer_with_another_fingerprint_is_rejected() -> None:
    entry = to_entry(get_tokenizer("bytes"))
    assert from_entry(entry).name == "bytes"
    with pytest.raises(UserError, match="another bytes tokenizer"):
        from_entry(structs.replace(entry, fingerprint="0" * 64), "some/manifest.json")
    with pytest.raises(UserError, match="another char tokenizer"):
        from_entry(structs.replace(to_entry(CharTokenizer("abc")), table="abd"))
    prints = [EncodingTokenizer("x", ".", ranks).fingerprint
              for ranks in ({b"a": 0, b"b": 1}, {b"b": 0, b"a": 1}, {b"a": 0, b"b": 1, b"ab": 2})]
    assert len(set(prints)) == 3


def test_unknown_tokenizer_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean gpt2") as caught:
        get_tokenizer("gpt-2")
    assert "\n" in str(caught.value)


def test_ids_are_checked_before_the_cast() -> None:
    for bad in (np.array([-5, 5]), np.array([65_536]), np.array([50_257])):
        with pytest.raises(ValueError, match="do not fit"):
            pack(bad, 50_257)
    good = np.array([0, 50_256, 40_000], np.int64)
    assert pack(good, 50_257).dtype == "<u2"
    np.testing.assert_array_equal(pack(good, 50_257).astype(np.int64), good)
    assert [token_dtype(size).itemsize for size in (257, 65_536, 65_537)] == [2, 2, 4]


def test_merges_file_gives_ranks_in_gpt2s_byte_order() -> None:
    ranks = read_merges("#version: 0.2\nĠ t\nĠt h\nÃ ©\n")
    assert len(ranks) == 259
    assert [ranks[b"!"], ranks[b"~"], ranks[b"\xa1"], ranks[b"\x00"], ranks[b" "], ranks[b"\xad"]] == [
        0, 93, 94, 188, 220, 255]
    assert [ranks[b" t"], ranks[b" th"], ranks["é".encode()]] == [256, 257, 258]


def test_missing_gpt2_file_error_has_path_and_command(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        get_tokenizer("gpt2")
    assert str(tmp_path / "cache" / "tiktoken" / "vocab.bpe") in str(caught.value)
    assert "python3 -m ezpz_llm.data tokenizer gpt2 --from-folder DIR" in str(caught.value)


def test_wrong_gpt2_file_is_rejected_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nh e\n")
    with pytest.raises(UserError, match="this is not the vocabulary of the gpt2 tokenizer"):
        install_gpt2(tmp_path)
    assert (tmp_path / "vocab.bpe").exists()
    assert not GPT2_VOCAB.path.exists()
    with pytest.raises(UserError, match=r"neither vocab\.bpe nor 6d1cbeee0f20b3d9449abfede4726ed8212e3aee"):
        install_gpt2(tmp_path / "nowhere")
    GPT2_VOCAB.path.parent.mkdir(parents=True)
    GPT2_VOCAB.path.write_text("cut short")
    with pytest.raises(UserError, match="9 bytes with sha256"):
        get_tokenizer("gpt2")


@pytest.mark.parametrize("name", GPT2_NAMES)
def test_gpt2(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(vocab_bpe().read_bytes())
    assert install_gpt2(tmp_path) == GPT2_VOCAB.path
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.fingerprint == GPT2_FINGERPRINT
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50_257, 50_256)
    ids = tokenizer.encode(GPT2_TEXT)
    np.testing.assert_array_equal(ids, [15496, 11, 314, 1101, 257, 3303, 2746, 11])
    assert tokenizer.decode(ids) == GPT2_TEXT
    assert 50_256 not in tokenizer.encode("one<|endoftext|>two")
    for text in ("naïve  \n\n\tκόσμε 😀🏽", "\u3000 a\u00a0b\r\n ", "x" * 3000 + " " * 3000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet="ab'sé中1, .\n\r\t\u00a0\u3000\u2028\x85\x1c 😀", max_size=60))
@settings(max_examples=300, deadline=None)
def test_cutting_a_text_preserves_gpt2_tokens(text: str) -> None:
    """A cut could change pieces, not merges, so any vocabulary would show it; this one merges white space."""
    tokenizer = _space_merging()
    data = text.encode()
    cut = find_cut(data)
    parts = [data[:cut].decode(), data[cut:].decode()]
    np.testing.assert_array_equal(np.concatenate([tokenizer.encode(part) for part in parts]),
                                  tokenizer.encode(text))


def test_cuts_are_found_in_any_script() -> None:
    assert find_cut(b"one two") == 3
    assert find_cut("один два три".encode()) == len("один два".encode())
    assert find_cut("中文。\n日本語".encode()) == len("中文。\n".encode())
    assert find_cut("one  two\n\nthree\r\nfour\u3000 five".encode()) == 0


def _space_merging() -> EncodingTokenizer:
    from ezpz_llm.training.data.tokenizers import _GPT2_PIECES

    pairs = ["\n\n", "  ", " \n", "\n ", "\r\n", " a", "ab", "'s", "\t ", "\n\n\n", "  \n"]
    ranks = {bytes([value]): value for value in range(256)}
    return EncodingTokenizer("test", _GPT2_PIECES, ranks | {p.encode(): 256 + i for i, p in enumerate(pairs)})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Local web server that serves /file.txt."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "file.txt").write_text("what is wanted")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(served))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_download_is_announced_and_checked(server: str, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    sha256 = hashlib.sha256(b"what is wanted").hexdigest()
    file = replace(GPT2_VOCAB, address=f"{server}/file.txt", size=14, sha256=sha256)
    assert file.download().read_text() == "what is wanted"
    stderr = capsys.readouterr().err
    assert f"{server}/file.txt" in stderr
    assert "14 bytes" in stderr
    assert sha256 in stderr
    with pytest.raises(UserError, match="this is not the vocabulary"):
        replace(file, name="other", sha256="0" * 64).download()
    assert not file.path.with_name("other").exists()
    with pytest.raises(UserError, match="the download failed"):
        replace(file, address=f"{server}/missing.txt").download()
