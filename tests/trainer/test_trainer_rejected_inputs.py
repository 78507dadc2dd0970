"""Inputs that do not belong together: `launch` prints one message, exits with code 2, and writes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launch_runs import launch
from safetensors.torch import save_file

from ezpz_llm import checkpoint
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.tokenizers import CharTokenizer, to_entry
from ezpz_llm.training.hf.config import stored_tensors, to_hf
from ezpz_llm.training.hf.tokenizer import write_tokenizer
from ezpz_llm.training.model.config import get_model_config

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60
INDEX = "model.safetensors.index.json"


def write_weights(folder: Path) -> Path:
    """Write a Hugging Face folder with two weights files, and a tokenizer of the characters of TEXT."""
    tokenizer = CharTokenizer("".join(sorted(set(TEXT))))
    model = get_model_config("tiny-gpt2", n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_multiple=1,
                             vocab_size=tokenizer.vocab_size)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(model)))
    tensors = {stored.name: torch.zeros(stored.stored_shape) for stored in stored_tensors(model)}
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    write_tokenizer(to_entry(tokenizer), 32, folder)
    return folder


def with_changed_json(path: Path, change: Callable[[dict], object]) -> None:
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def of_another_tokenizer(place: Path) -> list[str]:
    prepare(str(place / "text.txt"), "bytes", out=place / "shards", progress=False)
    return ["--init-from", str(write_weights(place / "hf")), "--corpus", str(place / "shards")]


def beyond_the_vocabulary(place: Path) -> list[str]:
    (place / "shards").mkdir()
    for name in ("train.bin", "val.bin"):
        np.full(4000, 300, np.uint16).tofile(place / "shards" / name)
    return ["--corpus", str(place / "shards"), "--tokenizer", "bytes"]


def swapped_index(place: Path) -> list[str]:
    folder = write_weights(place / "hf")
    files = sorted(path.name for path in folder.glob("model-*"))
    other = dict(zip(files, reversed(files), strict=True))
    with_changed_json(folder / INDEX, lambda stored: stored.update(weight_map={
        name: other[file] for name, file in stored["weight_map"].items()}))
    return ["--init-from", str(folder), "--corpus", str(place / "text.txt")]


def of_an_unknown_architecture(place: Path) -> list[str]:
    folder = write_weights(place / "hf")
    with_changed_json(folder / "config.json", lambda stored: stored.update(model_type="mamba"))
    return ["--init-from", str(folder), "--corpus", str(place / "text.txt")]


@pytest.mark.parametrize(("make", "message"), [
    (of_another_tokenizer, "the weights' tokenizer is char"), (beyond_the_vocabulary, "token 300 at position 0"),
    (swapped_index, "which model.safetensors.index.json lists"), (of_an_unknown_architecture, "is 'mamba'")])
def test_launch_writes_nothing(make: Callable[[Path], list[str]], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = make(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = launch(tmp_path, "-n", "2", sys.executable, "-m", "ezpz_llm.train", "--device", "cpu", *words,
                  EZPZ_LLM_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr.count("error:"), done.stdout) == (2, 1, ""), done.stdout + done.stderr
    assert message in done.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("make", [swapped_index, of_an_unknown_architecture])
def test_an_export_writes_nothing(make: Callable[[Path], list[str]], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError) as caught:
        checkpoint.main(["export", make(tmp_path)[1], str(tmp_path / "out" / "exported")])
    assert caught.value.exit_code == 2
    assert not any((tmp_path / "out").iterdir())
