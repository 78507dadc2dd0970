"""Tokenizer of weights: it is the default; another one must be requested; unknown ones are rejected by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import vocab_bpe
from safetensors.torch import save_file
from slowness import scaled
from small_tokenizers import FAMILIES, mixed_text, own_ids, trained

from ezpz_llm import evaluate, generate
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.data.manifest import TokenizerEntry, read_manifest
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.tokenizer_files import copy_files, entry_of_file
from ezpz_llm.training.data.tokenizers import (
    GPT2_FINGERPRINT,
    CharTokenizer,
    Tokenizer,
    choose_tokenizer,
    get_tokenizer,
    install_gpt2,
    match_built_in,
    read_merges,
    to_entry,
)
from ezpz_llm.training.hf.config import stored_tensors, to_hf
from ezpz_llm.training.hf.export import export
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.hf.tokenizer import tokenizer_of, write_tokenizer
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import RunPlan, check_run

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60
OTHER = "THE QUICK BROWN FOX JUMPS\n" * 60
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(OTHER)
    return tmp_path


def char(text: str = TEXT) -> CharTokenizer:
    return CharTokenizer("".join(sorted(set(text))))


def weights(folder: Path, tokenizer: Tokenizer | None, vocab_size: int = 0) -> Path:
    """Write a Hugging Face folder with a tokenizer and random weights whose predictions are confident."""
    model = get_model_config("tiny-gpt2", n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_multiple=1,
                             vocab_size=vocab_size or tokenizer.vocab_size)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(model)))
    draw = torch.Generator().manual_seed(3)
    save_file({tensor.name: 2 * torch.randn(tensor.stored_shape, generator=draw)
               for tensor in stored_tensors(model)}, folder / "model.safetensors", {"format": "pt"})
    if tokenizer is not None:
        write_tokenizer(to_entry(tokenizer), 32, folder)
    return folder


def train(*arguments: object) -> RunPlan:
    """Run the check of `ezpz_llm.train` and return its plan."""
    return check_run(parse([*map(str, arguments), "--global-batch-size", "4"]), 1)


def evaluated(*arguments: object) -> None:
    evaluate.main(["val", *map(str, arguments), "--check"])


def test_tokenizer_of_the_weights_is_the_default(place: Path) -> None:
    """The weights' tokenizer replaces the corpus's default."""
    folder = weights(place / "hf", char())
    plan = train("--init-from", folder, "--corpus", "text.txt")
    assert (plan.config.tokenizer, str(plan.sources["tokenizer"])) == (str(folder), "weights to begin with")
    shards = prepare("text.txt", str(folder), progress=False)
    assert read_manifest(shards).tokenizer == to_entry(char())
    evaluated(folder, "--corpus", "text.txt")
    # Shards with the same characters, prepared without the weights, are used as they are.
    plain = prepare("other.txt", "char", progress=False)
    assert prepare("other.txt", str(weights(place / "same", char(OTHER))), progress=False) == plain
    assert train("--init-from", place / "same", "--corpus", plain).config.tokenizer == str(place / "same")


def test_other_alphabet_is_rejected(place: Path) -> None:
    """A smaller alphabet would fit the embedding, but every id would mean another character."""
    folder = weights(place / "hf", char())
    shards = prepare("other.txt", "char", progress=False)
    for check in (lambda: train("--init-from", folder, "--corpus", shards),
                  lambda: train("--init-from", folder, "--corpus", f"{shards}=1,{folder}/none=1"),
                  lambda: evaluated(folder, "--corpus", shards)):
        with pytest.raises(UserError, match=r"tokenizer is char \(28 characters, .* corpus's is char \(21"):
            check()
    # "char" selects the weights' alphabet; a missing character is an error during preparation.
    plan = train("--init-from", folder, "--corpus", "other.txt", "--tokenizer", "char")
    with pytest.raises(UserError, match="unknown character"):
        prepare("other.txt", plan.config.tokenizer, progress=False)


def test_prepared_corpus_of_another_tokenizer_is_rejected_unless_requested(place: Path) -> None:
    folder = weights(place / "hf", char(), vocab_size=300)
    shards = prepare("text.txt", "bytes", out=place / "bytes", progress=False)
    for check in (lambda: train("--init-from", folder, "--corpus", shards),
                  lambda: train("--preset", "shakespeare-char-cpu", "--init-from", folder, "--corpus", shards,
                                "--model", "tiny-gpt2"),
                  lambda: evaluated(folder, "--corpus", shards)):
        with pytest.raises(UserError) as caught:
            check()
        assert "weights' tokenizer is char (28 characters, fingerprint " in str(caught.value)
        assert "corpus's is bytes (fingerprint " in str(caught.value)
        assert f"prepare it with --tokenizer {folder}" in str(caught.value)
    for choice in ("bytes", shards):
        assert train("--init-from", folder, "--corpus", shards, "--tokenizer", choice).config.tokenizer == "bytes"
        evaluated(folder, "--corpus", shards, "--tokenizer", choice)
    with pytest.raises(UserError, match="the weights' tokenizer is char"):
        train("--init-from", folder, "--corpus", shards, "--tokenizer", "char")


def test_another_end_of_text_token_is_another_tokenizer(place: Path) -> None:
    """The same tokenizer.json with another eos_token gives the same ids for text, but not between documents."""
    folder = weights(place / "hf", None, vocab_size=700)
    shards = {}
    for name in ("<pad>", "<|endoftext|>"):
        copy_files(trained("byte-level BPE"), folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        shards[name] = prepare("text.txt", str(folder), progress=False)
    first, second = (read_manifest(shards[name]) for name in shards)
    assert (first.end_of_text, second.end_of_text) == (0, 1)
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint
    train("--init-from", folder, "--corpus", shards["<|endoftext|>"])
    with pytest.raises(UserError, match=r"is hf \(.*end-of-text 1, .* corpus's is hf \(.*end-of-text 0, "):
        train("--init-from", folder, "--corpus", shards["<pad>"])


def test_unknown_and_unsupported_tokenizers_are_rejected_by_name(place: Path) -> None:
    folder = weights(place / "hf", None, vocab_size=300)
    for check in (lambda: train("--init-from", folder, "--corpus", "text.txt"),
                  lambda: evaluated(folder, "--corpus", "text.txt")):
        with pytest.raises(UserError, match="the tokenizer of the weights is unknown") as caught:
            check()
        assert "--tokenizer gpt2 for GPT-2's" in caught.value.instead
    assert train("--init-from", folder, "--corpus", "text.txt", "--tokenizer", "bytes").config.tokenizer == "bytes"
    (folder / "vocab.txt").write_text("[PAD]\na\n")
    for check in (lambda: train("--init-from", folder, "--corpus", "text.txt"),
                  lambda: evaluated(folder, "--corpus", "text.txt"),
                  lambda: prepare("text.txt", str(folder))):
        with pytest.raises(UserError, match=r"tokenizer is WordPiece \(vocab.txt\)"):
            check()
    with pytest.raises(UserError, match="this folder contains no tokenizer"):
        prepare("text.txt", str(place))
    with pytest.raises(UserError, match="unknown tokenizer 'gtp2'"):
        train("--init-from", folder, "--tokenizer", "gtp2")


def test_gpt2_is_recognized_by_its_table(place: Path) -> None:
    """gpt2 is recognized without vocab.bpe in exports of ezpz_llm and transformers, unless a merge differs."""
    file = vocab_bpe()
    entry = TokenizerEntry("gpt2", GPT2_FINGERPRINT)
    install_gpt2(file.parent)
    folder = weights(place / "hf", get_tokenizer("gpt2"))
    (place / "cache/tiktoken/vocab.bpe").unlink()
    assert choose_tokenizer(str(folder)).entry == entry
    with pytest.raises(UserError, match="is not on this machine"):  # and not encoded as bytes
        train("--init-from", folder, "--corpus", "text.txt")
    with pytest.raises(UserError, match="is not on this machine"):
        evaluated(folder, "--corpus", "text.txt")
    stored = json.loads((folder / "tokenizer.json").read_text())
    merges = stored["model"]["merges"]
    stored["model"]["merges"] = [merge.split(" ") for merge in merges]  # as newer versions write them
    assert match_built_in(stored) == entry
    stored["model"]["merges"] = [merges[1], merges[0], *merges[2:]]
    assert match_built_in(stored) is None
    stored["model"]["merges"] = merges
    stored["added_tokens"].append({"id": 50257, "content": "<pad>", "special": True})
    assert match_built_in(stored) == entry
    stored["pre_tokenizer"]["add_prefix_space"] = True
    assert match_built_in(stored) is None
    transformers = pytest.importorskip("transformers")
    vocabulary = {name: rank for name, rank in json.loads((folder / "tokenizer.json").read_text())
                  ["model"]["vocab"].items()}
    assert len(vocabulary) == len(read_merges(file.read_text("utf-8")))
    (place / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 50256}))
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(place, vocab_file=str(place / "vocab.json"),
                                                               merges_file=str(file))
    tokenizer.save_pretrained(place / "theirs")
    assert choose_tokenizer(str(place / "theirs")).entry == entry


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_with_a_tokenizer_of_another_library(place: Path, family: str) -> None:
    """The weights' tokenizer encodes corpora and is copied to exports; another tokenizer is rejected."""
    file = trained(family)
    folder = weights(place / "hf", None, vocab_size=700)
    copy_files(file, folder)
    folder_name = train("--init-from", folder, "--corpus", "text.txt").config.tokenizer
    assert folder_name == str(folder)
    prepared = prepare("text.txt", folder_name, progress=False)
    assert read_manifest(prepared).tokenizer.fingerprint == entry_of_file(file).fingerprint
    evaluated(folder, "--corpus", "text.txt")
    shards = prepare("text.txt", "bytes", progress=False)
    with pytest.raises(UserError, match=r"the weights' tokenizer is hf \((tokenizers|sentencepiece), \d+ tokens, .*"
                                        r"corpus's is bytes"):
        train("--init-from", folder, "--corpus", shards)
    small = weights(place / "small", None, vocab_size=200)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens, .* 200"):
        train("--init-from", small, "--corpus", "text.txt", "--tokenizer", file)
    source = find_source(str(folder), "here")
    size = tokenizer_of(source, str(file)).vocab_size
    padded = replace(source.model, vocab_size=size - 1, vocab_multiple=128)
    with pytest.raises(UserError, match=rf"the tokenizer has {size} tokens, the model {size - 1}"):
        tokenizer_of(replace(source, model=padded), str(file))
    exported = export(source, place / "out")
    assert exported.notes == ()
    assert (place / "out" / file.name).read_bytes() == file.read_bytes()


def test_an_exported_tokenizer_is_loaded_by_transformers(place: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file, text = trained("byte-level BPE"), "the learning rate, naïve  日本語\n"
    end, note = write_tokenizer(entry_of_file(file), 32, place / "out", file.parent)
    assert (end, note) == (1, None)
    loaded = transformers.AutoTokenizer.from_pretrained(place / "out")
    assert loaded(text, add_special_tokens=False)["input_ids"] == own_ids(file, text)
    assert (loaded.eos_token, loaded.eos_token_id, loaded.model_max_length) == ("<|endoftext|>", 1, 32)
    end, note = write_tokenizer(entry_of_file(file), 32, place / "none", place)
    assert end is None
    assert "is missing (copy the tokenizer.json with the fingerprint" in str(note)


def test_bytes_and_char_are_recognized_by_their_whole_table(place: Path) -> None:
    for tokenizer in (get_tokenizer("bytes"), char()):
        write_tokenizer(to_entry(tokenizer), 32, place)
        stored = json.loads((place / "tokenizer.json").read_text())
        assert match_built_in(stored) == to_entry(tokenizer)
        first, second = list(stored["model"]["vocab"])[:2]
        vocabulary = stored["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        assert match_built_in(stored) is None
    for nothing in ({}, {"model": None}, {"model": {"vocab": [], "merges": []}}, {"model": {"type": "WordPiece"}}):
        assert match_built_in(nothing) is None


@pytest.mark.full
def test_warnings_for_a_loss_above_chance_and_for_another_tokenizer(
        place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Confident random weights, in training and in evaluation."""
    folder = weights(place / "hf", char(), vocab_size=300)
    command = [sys.executable, "-m", "ezpz_llm.train", "--init-from", str(folder), "--corpus", "text.txt",
               "--tokenizer", "bytes", "--steps", "2", "--sample-tokens", "0", "--save-every", "-1", "--profile",
               "false", "--precision", "fp32", "--device", "cpu", "--run-dir", "run", "--ds-config", "ddp"]
    process = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=scaled(150), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    both = "the weights' tokenizer is char (28 characters, "
    assert f"warning    {both}" in process.stdout
    assert f"of the loaded weights is above ln V = {math.log(300):.2f}" in process.stdout
    assert evaluate.main(["val", str(folder), "--corpus", "text.txt", "--device", "cpu", "--run-dir", "at"]) == 0
    assert read_record(RunDir(place / "at")).evaluation["val"]["tokenizer"] == "char"
    stderr = capsys.readouterr().err
    assert f"warning: the loss is above ln V = {math.log(300):.4f}" in stderr
    assert both not in stderr
    generate.main([str(folder), "--tokenizer", "bytes", "--tokens", "2", "--device", "cpu", "--run-dir", "made"])
    assert f"warning: {both}" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_keeps_its_tokenizer(place: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Generation, export and evaluation from a run's checkpoint work after its shards are deleted."""
    file = trained(family)
    (place / "mixed.txt").write_text(mixed_text(60_000))
    command = [sys.executable, "-m", "ezpz_llm.train", "--model", "tiny-gpt2", "--n-layer", "1", "--n-embd", "32",
               "--block-size", "32", "--corpus", "mixed.txt", "--tokenizer", str(file), "--steps", "2", "--profile",
               "false", "--device", "cpu", "--run-dir", "run", "--ds-config", "ddp", "--prompt", "the learning"]
    env = ENV | {"EZPZ_LLM_CACHE": str(place / "cache")}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(150), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    shutil.rmtree(place / "cache")
    assert generate.main(["run", "--prompt", "the learning", "--tokens", "4", "--device", "cpu"]) == 0
    assert "the learning" in capsys.readouterr().out
    export(find_source("run", "here"), place / "out")
    assert (place / "out" / file.name).read_bytes() == file.read_bytes()
    assert train("--init-from", "run", "--corpus", "text.txt").config.tokenizer != "bytes"
    shards = prepare("text.txt", str(find_source("run", "here").folder), progress=False)
    assert read_manifest(shards).tokenizer.fingerprint == entry_of_file(file).fingerprint
