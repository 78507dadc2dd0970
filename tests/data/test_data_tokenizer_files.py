"""Tokenizers of other libraries: ids equal the library's for any cut of a text; fingerprints of their tables."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import HELPERS
from slowness import scaled
from small_tokenizers import FAMILIES, mixed_text, own_ids, trained

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data import tokenizer_files
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.reader import tasks
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenize_corpus import encode_task
from ezpz_llm.training.data.tokenizer_files import KINDS, entry_of_file, load
from ezpz_llm.training.data.tokenizers import choose_tokenizer, from_entry


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


def all_ids(folder: Path) -> np.ndarray:
    opened = TokenData.open(folder)
    return np.concatenate([opened.split("train")[:], opened.split("val")[:]])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_in_many_pieces_has_the_same_ids_as_in_the_library(tmp_path: Path, family: str) -> None:
    """Text cut every few kilobytes in any script, and JSON lines."""
    file, text = trained(family), mixed_text(90_000)
    (tmp_path / "a.txt").write_text(text, newline="")
    tokenizer = load(file)
    read_tasks = list(tasks(find_corpus(str(tmp_path / "a.txt")), size=3_000, cut=tokenizer.cut))
    assert len(read_tasks) > 15
    ids = np.concatenate([encode_task(task, tokenizer).tokens for task in read_tasks])
    end = tokenizer.end_of_text
    np.testing.assert_array_equal(ids, [end, *own_ids(file, text)])
    lines = [part for part in text.split("\n\n")[:200] if part]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    folder = prepare(str(tmp_path / "b.jsonl"), str(file), progress=False)
    np.testing.assert_array_equal(all_ids(folder), [id_ for line in lines for id_ in (end, *own_ids(file, line))])


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_has_the_same_ids_as_each_text(family: str) -> None:
    file = trained(family)
    tokenizer = load(file)
    texts = [mixed_text(size, size) for size in (1, 30, 5000)] + ["", " a", "<|endoftext|>", "</s>", "a\0b"]
    for batch in ([], texts, [*texts, "a\ud800b"]):  # a lone surrogate, which the libraries reject
        ids = tokenizer.encode_batch(batch)
        assert [part.dtype for part in ids] == [np.uint32] * len(batch)
        expected = [own_ids(file, text.replace("\ud800", "\ufffd")) for text in batch]
        assert [part.tolist() for part in ids] == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_10_mb_of_mixed_scripts(tmp_path: Path, family: str) -> None:
    file, text = trained(family), mixed_text(10_000_000, seed=3)
    (tmp_path / "a.txt").write_text(text, newline="")
    folder = prepare(str(tmp_path / "a.txt"), str(file.parent), workers=2, progress=False)
    np.testing.assert_array_equal(all_ids(folder)[1:], own_ids(file, text))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_include_a_copy_of_the_tokenizer(tmp_path: Path, family: str) -> None:
    file = trained(family)
    (tmp_path / "a.txt").write_text(mixed_text(20_000))
    shards = prepare(str(tmp_path / "a.txt"), str(file), out=tmp_path / "shards", progress=False)
    facts = read_manifest(shards)
    name = KINDS[facts.tokenizer.kind]
    assert facts.tokenizer == entry_of_file(file)
    assert (shards / name).read_bytes() == file.read_bytes()
    assert (facts.vocab_size, facts.end_of_text) == (load(file).vocab_size, load(file).end_of_text)
    assert str(file) in facts.command
    moved = shards.rename(tmp_path / "moved")
    tokenizer = TokenData.open(moved).tokenizer
    ids = tokenizer.encode("the learning rate")
    assert tokenizer.decode(ids) == "the learning rate"
    np.testing.assert_array_equal(ids, own_ids(file, "the learning rate"))
    # The folder of shards selects the same tokenizer as the file, so the same text is prepared only once.
    assert choose_tokenizer(str(moved)).entry == facts.tokenizer
    first = prepare(str(tmp_path / "a.txt"), str(moved), progress=False)
    assert prepare(str(tmp_path / "a.txt"), str(file.parent), progress=False) == first
    mixture = prepare(f"{moved}=1,{first}=1", progress=False)
    assert TokenData.open(mixture).tokenizer.name == tokenizer.name
    (moved / name).unlink()
    with pytest.raises(UserError, match=f"the {name} of the tokenizer .* is missing"):
        from_entry(facts.tokenizer, folder=moved)


def test_fingerprint_is_independent_of_how_the_file_was_saved(tmp_path: Path) -> None:
    file = trained("byte-level BPE")
    stored = json.loads(file.read_text())
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in stored["model"]["merges"]]
    stored["model"]["merges"] = [" ".join(pair) for pair in pairs]
    stored["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored, indent=1))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<pad>"}}')
    saved = load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ["<pad>"]}')  # invalid, so the name decides
    assert entry_of_file(tmp_path / "tokenizer.json").end_of_text == stored["model"]["vocab"]["<|endoftext|>"]
    assert saved.fingerprint == entry_of_file(file).fingerprint
    assert saved.end_of_text == stored["model"]["vocab"]["<pad>"]
    text = "the learning rate <|endoftext|> <pad>"
    np.testing.assert_array_equal(saved.encode(text), own_ids(file, text))
    assert saved.encode(text).size > 3
    assert not {0, 1} & set(saved.encode(text).tolist())
    stored["model"]["merges"][0], stored["model"]["merges"][1] = stored["model"]["merges"][1::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert entry_of_file(tmp_path / "tokenizer.json").fingerprint != saved.fingerprint
    with pytest.raises(UserError, match="this tokenizer did not make the tokens"):
        load(tmp_path / "tokenizer.json", saved.entry)


def test_tokenizer_that_did_not_make_the_shards_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(mixed_text(20_000))
    shards = prepare(str(tmp_path / "a.txt"), str(trained("unigram")), progress=False)
    for tokenizer in (str(trained("SentencePiece BPE")), "bytes"):
        with pytest.raises(UserError, match="this folder was prepared with the tokenizer unigram"):
            check_corpus(str(shards), tokenizer)
    plain = prepare(str(tmp_path / "a.txt"), "bytes", progress=False)
    with pytest.raises(UserError, match="must have the same tokenizer; these have unigram-700 and bytes"):
        prepare(f"{shards}=1,{plain}=1", progress=False)


def test_tiktoken_ranks_of_llama_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Meta's tokenizer.model has no pattern, so its hash must be known. The real file: test_real_tokenizers.py."""
    folder = tmp_path / "Llama-3"
    folder.mkdir()
    tokens = [*(bytes([value]) for value in range(256)), b"th", b"the"]
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match="tokens of tiktoken, but not the pattern") as caught:
        choose_tokenizer(str(folder))
    assert caught.value.instead == "pass the tokenizer.json of the same model"
    monkeypatch.setattr(tokenizer_files, "_LLAMA3_SHA256", hashlib.sha256(content).hexdigest())
    os.utime(folder / "tokenizer.model", (1, 1))  # known entries are cached by time
    (tmp_path / "a.txt").write_text("the 1234\n\n  théâtre" * 50)
    shards = prepare(str(tmp_path / "a.txt"), str(folder), progress=False)
    tokenizer = TokenData.open(shards).tokenizer
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("Llama-3", 128_256, 128_001)
    assert all_ids(shards)[:7].tolist() == [128_001, 257, *b" 1234"]
    assert tokenizer.encode("a\ud800<|end_of_text|>").tolist() == [*b"a\xef\xbf\xbd<|end_of_", *b"text|>"]
    assert tokenizer.decode(all_ids(shards)) == (tmp_path / "a.txt").read_text()
    (tmp_path / "b.txt").write_text("<|begin_of_text|>the<|eot_id|>")
    prepare(str(tmp_path / "b.txt"), str(folder))
    assert "the text has 2 special tokens of the tokenizer, encoded as ordinary text" in capsys.readouterr().err


def test_tekken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {"pattern": "x"}, "vocab": [{"rank": 0}]}')
    with pytest.raises(UserError, match="of Hugging Face tokenizers: it is a Tekken tokenizer of Mistral"):
        choose_tokenizer(str(tmp_path / "tekken.json"))
    with pytest.raises(UserError, match="this folder's tokenizer is Tekken"):
        choose_tokenizer(str(tmp_path))


def test_files_without_a_tokenizer_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.txt").write_text("text")
    for name, content, message in (("tokenizer.json", "{", "not a tokenizer.json of Hugging Face tokenizers"),
                                   ("tokenizer.json", '{"model": {"vocab": {}}}', "not a tokenizer.json of"),
                                   ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}', "not a tokenizer.json"),
                                   # would need 16 GB of counters, one per id
                                   ("tokenizer.json", '{"model": {"vocab": {"a": 2147483648}}}', "ids are from 0"),
                                   ("x.model", "nothing", "SentencePiece cannot read this"),
                                   ("a.vocab", "a b", "this file is not a tokenizer")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message) as caught:
            check_corpus(str(tmp_path / "a.txt"), str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)
        assert "SentencePiece *.model" in caught.value.instead
    panics = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
              "continuing_subword_prefix": "####"}  # longer than "b", which the library does not check
    for model in ({"type": "Odd", "vocab": {"a": 0}}, panics):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
        with pytest.raises(UserError, match="the library tokenizers cannot read this"):
            prepare(str(tmp_path / "a.txt"), str(tmp_path), progress=False)
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.parametrize("family", ["byte-level BPE", "unigram"])
def test_missing_library_is_reported_with_its_extra(tmp_path: Path, family: str) -> None:
    """The check before any rank starts imports neither torch nor the tokenizer library."""
    file = trained(family)
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    (tmp_path / "sentencepiece.py").write_text("raise ImportError('not here')")
    script = ("import importlib.util, sys\nfind = importlib.util.find_spec\n"
              "importlib.util.find_spec = lambda name: None if name == 'tokenizers' else find(name)\n"
              "from ezpz_llm.core.base.errors import run_command\nfrom ezpz_llm.training.data.command import main\n"
              "raise SystemExit(run_command(main))")
    result = subprocess.run([sys.executable, "-c", script, "prepare", "a.txt", "--tokenizer", str(file), "--check"],
                            capture_output=True, text=True, timeout=scaled(60), cwd=tmp_path)
    extra = "tokenizers" if file.suffix == ".json" else "sentencepiece"
    assert result.returncode == 2
    assert f"pip install 'ezpz_llm[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_killed_at_every_operation(tmp_path: Path, family: str) -> None:
    """The final files, including the tokenizer's, are bitwise identical, as in test_data_scale."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    (source / "a.txt").write_text(mixed_text(24_000))
    (source / "b.jsonl").write_text("".join(json.dumps({"text": mixed_text(200, n)}) + "\n" for n in range(40)))
    process = subprocess.run([sys.executable, HELPERS / "data_kills.py", source, folder, trained(family)],
                             capture_output=True, text=True, timeout=scaled(300))
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["operations"] > 25
    assert trained(family).name in report["names"]
    assert [result for result in report["results"] if not result["same"]] == []
    assert report["left"] == ["often", "whole"]
    assert max(result["kept"] for result in report["results"][1:]) == 41
