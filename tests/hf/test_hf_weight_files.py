"""Folders of weights that differ from config.json: the right values, or a helpful error."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ezpz_llm import checkpoint
from ezpz_llm.core.base import UserError, run_command
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.evaluate import command as evaluate, generation as generate
from ezpz_llm.training.hf.config import stored_tensors, to_hf
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.hf.weights import open_weights
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import load_values
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

TABLES = {"tiny-gpt2": "transformer.wte.weight", "tiny-llama": "model.embed_tokens.weight"}
SINGLE, INDEX, HEAD = "model.safetensors", "model.safetensors.index.json", "lm_head.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
Change = Callable[[dict[str, torch.Tensor]], Any]


def config_of(shape: str) -> Any:
    return get_model_config(shape, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, block_size=16, vocab_size=257,
                            vocab_multiple=1, tied=True, dropout=0.0)


def write(folder: Path, shape: str = "tiny-gpt2", change: Change | None = None, **settings: Any) -> Path:
    """Write a model as transformers saves it, with changed tensors or config.json."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {stored.name: 0.1 * torch.randn(stored.stored_shape, generator=generator)
               for stored in stored_tensors(config_of(shape))}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**to_hf(config_of(shape)), **settings}))
    return folder


def split(folder: Path) -> Path:
    """Convert the weights to two shards and an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (name > names[len(names) // 2])}-of-00002.safetensors" for name in names}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / SINGLE).unlink()
    return folder


def weights_of(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return our model's parameters, and the notes on reading them."""
    source = find_source(str(folder), "test")
    model = GPT(source.model)
    with open_weights(source) as weights:
        load_values(model, weights.read)
    return dict(model.named_parameters()), weights.notes


def same(left: Path, right: Path) -> bool:
    values_right = weights_of(right)[0]
    return all(torch.equal(values, values_right[name]) for name, values in weights_of(left)[0].items())


def renamed(prefix: str) -> Change:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return rename


@pytest.mark.parametrize("shape", TABLES)
def test_a_stored_head_is_the_tied_embedding_or_an_error(shape: str, tmp_path: Path) -> None:
    table = TABLES[shape]
    plain = write(tmp_path / "plain", shape)
    assert same(write(tmp_path / "equal", shape, lambda w: w.update({HEAD: w[table].clone()})), plain)
    assert same(write(tmp_path / "alone", shape, lambda w: w.update({HEAD: w.pop(table)})), plain)
    for name, head in (("other", lambda w: w[table] + 1), ("last", lambda w: w[table].index_fill(
            0, torch.tensor([256]), 0.5)), ("longer", lambda w: torch.cat((w[table], w[table][:7])))):
        folder = write(tmp_path / name, shape, lambda w, head=head: w.update({HEAD: head(w)}))
        with pytest.raises(UserError, match=f"{HEAD} differs from the embedding {table}") as caught:
            weights_of(folder)
        assert '"tie_word_embeddings": false' in str(caught.value)
    untied = write(tmp_path / "untied", shape, lambda w: w.update({HEAD: w[table] + 1}), tie_word_embeddings=False)
    parameters = weights_of(untied)[0]
    assert torch.equal(parameters["lm_head.weight"], parameters["transformer.wte.weight"] + 1)
    with pytest.raises(UserError, match=f"have no tensor {HEAD}") as caught:
        weights_of(write(tmp_path / "headless", shape, tie_word_embeddings=False))
    assert "tie_word_embeddings to true" in str(caught.value)


def test_the_files_are_those_that_transformers_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = write(tmp_path / "new"), split(write(tmp_path / "old", change=lambda w: w.update(
        {TABLES["tiny-gpt2"]: w[TABLES["tiny-gpt2"]] + 1})))
    mixed = shutil.copytree(old, tmp_path / "mixed")
    shutil.copy(new / SINGLE, mixed)
    assert same(mixed, new)
    assert not same(old, new)
    assert checkpoint.main(["inspect", str(mixed)]) == 0
    assert f"has {SINGLE} and {INDEX}: using {SINGLE}, as transformers does" in capsys.readouterr().out
    (old / "pytorch_model.bin").write_bytes(b"older weights")
    assert weights_of(old)[1] == [f"{old} has {INDEX} and pytorch_model.bin: using {INDEX}, as transformers does"]
    assert weights_of(new)[1] == []
    (new / SINGLE).unlink()
    (new / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        weights_of(new)


def test_an_index_that_does_not_fit_its_files_is_an_error_of_inspect_too(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    table = TABLES["tiny-gpt2"]

    def spoil(name: str, change: Callable[[Path, dict[str, str]], Any]) -> Path:
        folder = split(write(tmp_path / name))
        index = json.loads((folder / INDEX).read_text())
        change(folder, index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))
        return folder

    def twice(folder: Path, places: dict[str, str]) -> None:
        place = folder / (first if places[table] == second else second)
        save_file({**load_file(place), table: torch.zeros(257, 16)}, place, {"format": "pt"})

    def move(folder: Path, places: dict[str, str]) -> None:
        places[table] = first if places[table] == second else second

    for folder, message in (
            (spoil("missing", lambda folder, places: (folder / second).unlink()),
             f"{second} cannot be read: No such"),
            (spoil("outside", lambda folder, places: places.update({table: f"../missing/{first}"})),
             f"'../missing/{first}' must be a plain file name, without directories"),
            (spoil("twice", twice), f"the weights have the tensor {table} twice"),
            (spoil("moved", move), f"has no tensor {table}, which {INDEX} lists")):
        assert run_command(checkpoint.main, ["inspect", str(folder)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_forward_module."])
def test_names_that_model_wrappers_add_are_ignored(prefix: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    wrapped = write(tmp_path / "wrapped", change=renamed(prefix))
    assert same(wrapped, plain)
    [note] = weights_of(wrapped)[1]
    assert prefix.split(".")[0] in note
    both = write(tmp_path / "both", change=lambda w: w.update(
        {f"{prefix}transformer.ln_f.weight": w["transformer.ln_f.weight"] + 1}))
    with pytest.raises(UserError, match=r"have the tensor transformer\.ln_f\.weight twice"):
        weights_of(both)


def test_an_adapter_is_rejected_with_instructions(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    save_file({"base.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    inside = write(tmp_path / "inside", change=lambda w: w.update(
        {"base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight": torch.zeros(2, 16)}))
    for folder in (tmp_path / "adapter", inside):
        with pytest.raises(UserError, match="this is a LoRA adapter of PEFT") as caught:
            weights_of(folder)
        assert "merge_and_unload()" in str(caught.value)
    with pytest.raises(UserError, match="this is a LoRA adapter of PEFT"):
        run(parse(["--init-from", str(tmp_path / "adapter"), "--steps", "1", "--run-dir", str(tmp_path / "run")]))


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_reported_as_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (write(tmp_path / "model") / name).write_text(LFS)
    assert run_command(generate.main, ["model", *(["--tokenizer", "bytes"] if name == SINGLE else [])]) == 2
    assert "a Git LFS pointer: run git lfs pull" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text.txt", "lines.jsonl", "table.parquet", "nanogpt/train.bin"])
def test_a_corpus_of_git_lfs_pointers_is_not_trained_on(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(LFS)
    if name.endswith(".bin"):
        (path.parent / "val.bin").write_text(LFS)
        path = path.parent
    with pytest.raises(UserError, match="a Git LFS pointer: run git lfs pull"):
        prepare(str(path), "bytes")


def test_every_command_rejects_weights_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "items.jsonl").write_text('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}\n')

    def spoil(value: float) -> Change:
        return lambda w: w["transformer.h.0.mlp.c_fc.weight"].view(-1)[7:8].fill_(value)

    write(tmp_path / "nan", change=spoil(math.nan))
    write(tmp_path / "inf", change=spoil(-math.inf))
    model = ["--device", "cpu", "--tokenizer", "bytes"]
    commands: list[tuple[Any, list[str]]] = [
        (evaluate.main, ["val", "nan", "--corpus", "text.txt", *model]),
        (evaluate.main, ["hellaswag", "nan", "--file", "items.jsonl", *model]),
        (generate.main, ["inf", *model]),
        (checkpoint.main, ["export", "nan", "out"]),
        (lambda argv: run(parse(argv)), ["--init-from", "inf", "--corpus", "text.txt", "--steps", "1",
                                         "--run-dir", "run", *model])]
    for command, argv in commands:
        assert run_command(command, argv) == 2, argv
        assert "the weights contain NaN or Inf in transformer.h.0.mlp.c_fc.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
