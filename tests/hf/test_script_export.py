"""Checkpoints of scripts: exports that torch and transformers load, and the trainer's commands on them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_runs import clean_env, need_mpiexec
from places import HELPERS
from rank_jobs import results_of
from safetensors.torch import load_file, save_file
from script_checkpoints import MODELS
from slowness import scaled
from torch import Tensor

from ezpz_llm.checkpoint import main
from ezpz_llm.core.base import run_command
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_json
from ezpz_llm.train import main as train
from ezpz_llm.training.checkpoint.manifest import make_record, write_manifest
from ezpz_llm.training.checkpoint.script_model import ScriptModel
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.evaluate.command import main as evaluate
from ezpz_llm.training.evaluate.generation import main as generate
from ezpz_llm.training.hf import script_export
from ezpz_llm.training.hf.config import from_hf, stored_tensors
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.hf.weights import open_weights, read_box
from ezpz_llm.training.model.parameters import parameter_shapes, whole_box

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

RANK_0 = "rank-00000.safetensors"
PROGRAM = HELPERS / "script_checkpoints.py"
HUGGING_FACE = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
                "vit": "ViTForImageClassification"}


def in_one_process(folder: Path, *runs: str) -> dict[str, list[str]]:
    """Save the checkpoints of script_checkpoints.py; return each run's checkpoint and expected state."""
    done = subprocess.run([sys.executable, str(PROGRAM), str(folder), *runs], env=clean_env(OMP_NUM_THREADS="1"),
                          capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def exported_state(kind: str, out: Path) -> dict[str, Tensor]:
    """Load an export as its user would; return the loaded model's state_dict."""
    if kind in HUGGING_FACE:
        import transformers

        model, info = getattr(transformers, HUGGING_FACE[kind]).from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
    else:
        model = MODELS[kind].module()
        model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    return model.state_dict()


def check_export(name: str, checkpoint: str, expected: str, out: Path) -> None:
    """Export a checkpoint, in several files for transformers, and compare every tensor."""
    kind = name.split(":")[0]
    assert main(["export", checkpoint, str(out), "--shard-gb", "1e-5"]) == 0
    state, right = exported_state(kind, out), torch.load(expected)
    assert len(list(out.glob("*.safetensors"))) == 1 or kind in HUGGING_FACE
    assert right
    for key, value in right.items():
        assert state[key].dtype == value.dtype, (name, key)
        assert torch.equal(state[key], value), (name, key)
    if kind in HUGGING_FACE:
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == [HUGGING_FACE[kind]]
        assert config["dtype"] == "float32"
        assert config["ezpz_llm"]["from"] == checkpoint


def test_exports_load_in_torch_and_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = in_one_process(tmp_path, "Odder:ddp", "gpt2:ddp")
    for name, (checkpoint, expected) in found.items():
        check_export(name, checkpoint, expected, tmp_path / name)
    assert len(list((tmp_path / "gpt2:ddp").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "gpt2:ddp" / "generation_config.json").read_text())["eos_token_id"] == 256
    folder, _ = found["Odder:ddp"]
    assert main(["export", folder, str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    half = {name: tensor.dtype for name, tensor in load_file(tmp_path / "half" / "model.safetensors").items()}
    assert half["first.weight"] == half["fixed"] == half["rounded"] == torch.bfloat16
    assert (half["count"], half["mask"], half["same"]) == (torch.int64, torch.bool, torch.float32)
    assert run_command(main, ["export", folder, str(tmp_path / "half")]) == 2
    assert "the path to export to is not an empty folder" in capsys.readouterr().err
    check_inspection(folder, capsys)


def check_inspection(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspect and verify a checkpoint of `Odder`."""
    assert main(["inspect", folder, "--parameters"]) == 0
    printed = capsys.readouterr().out
    assert "Odder, 8 parameter tensors, 5 buffers" in printed
    assert "kind Odder" in printed
    assert "größe/x.weight" in printed
    assert main(["inspect", folder, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["models"][""]["buffers"] == ["count", "mask", "nothing", "rounded", "same"]
    assert [facts["state"][name] for name in ("step", "layout", "user")] == [1, "ddp", {"kind": "Odder"}]
    assert main(["verify", folder]) == 0


def write_checkpoint(folder: Path, models: dict[str, ScriptModel], parameters: dict[str, tuple[int, ...]]) -> Path:
    """Write a script's checkpoint without its tensors."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    state = State(step=3, optimizer_step=3, loss_scale=None, world_size=1, models=models)
    write_json(checkpoint / "state.json", as_plain(state))
    write_json(checkpoint / "index.json", {"format": 1, "kinds": ["weight"], "parameters": {
        name: {"shape": shape, "pieces": []} for name, shape in parameters.items()}})
    write_manifest(checkpoint, 3, [make_record(checkpoint / name) for name in ("state.json", "index.json")])
    return checkpoint


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 257}
SHAPES = {tensor.name: tensor.stored_shape for tensor in stored_tensors(from_hf(GPT2, ""))}
COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "train": (train, ["--check", "--corpus", "text.txt", "--steps", "9", "--tokenizer", "bytes", "--init-from"]),
    "generate": (generate, ["--check", "--tokenizer", "bytes"]),
    "evaluate": (evaluate, ["val", "--check", "--corpus", "text.txt", "--tokenizer", "bytes"])}


@pytest.mark.parametrize(("models", "extra", "found", "instead"), [
    ({"": ScriptModel(class_name="UNet")}, {}, "the checkpoint has a script's UNet, but only GPT2LMHeadModel",
     "checkpoint export"),
    ({"": ScriptModel(class_name="GPT2Model", config=GPT2)}, {}, "has a script's GPT2Model, but only",
     "checkpoint export"),
    ({"": ScriptModel(class_name="GPT2LMHeadModel", config={**GPT2, "scale_attn_weights": False})}, {},
     "a script's GPT2LMHeadModel with unsupported settings: scale_attn_weights is False", "checkpoint export"),
    ({"": ScriptModel(class_name="GPT2LMHeadModel", config=GPT2)}, {"value.weight": (1, 16)},
     r"have a tensor transformer.value.weight, which the model of the script's model.config", "checkpoint export"),
    ({"a": ScriptModel(class_name="A"), "b": ScriptModel(class_name="B")}, {}, "has 2 models: a, b", "OUT/NAME"),
    ({}, {}, "a script's module of an unknown class", "checkpoint export"),
])
def test_the_trainer_names_a_model_that_it_does_not_support(
        models: dict[str, ScriptModel], extra: dict[str, tuple[int, ...]], found: str, instead: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    checkpoint = write_checkpoint(tmp_path, models, {**SHAPES, **extra})
    for name, (command, argv) in COMMANDS.items():
        if extra and name != "train":
            continue  # names of tensors are compared when the weights are loaded
        assert run_command(command, [*argv, str(checkpoint)]) == 2
        printed = capsys.readouterr().err
        assert re.search(found, printed), printed
        assert instead in printed
        assert "damaged" not in printed
    assert run_command(train, ["--check", "--resume", "run"]) == 2
    assert "was saved by a script" in capsys.readouterr().err


def test_a_supported_model_is_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    checkpoint = write_checkpoint(tmp_path, {"": ScriptModel(class_name="GPT2LMHeadModel", config=GPT2)}, SHAPES)
    program = "import sys; from ezpz_llm.train import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *COMMANDS["train"][1], str(checkpoint)], cwd=tmp_path,
                          env=clean_env(), capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr


def tie_to_nothing(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    state["models"][""]["tied"] = {"b": "missing"}
    write_json(checkpoint / "state.json", state)
    write_manifest(checkpoint, 3, [make_record(checkpoint / name) for name in ("state.json", "index.json")])


@pytest.mark.parametrize(("damage", "problem"), [
    (tie_to_nothing, "state.json ties b to missing, which is missing"),
    (lambda checkpoint: (checkpoint / "state.json").write_text("{" * 99), "state.json has 99 bytes"),
    (lambda checkpoint: (checkpoint / "index.json").unlink(), "index.json is missing"),
])
def test_a_damaged_checkpoint_of_a_script_is_called_damaged(
        damage: Callable[[Path], object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(write_checkpoint(tmp_path, {"": ScriptModel(class_name="Net")}, {"a": (0,)}))
    assert run_command(main, ["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert f"the checkpoint is damaged: {problem}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def write_weights(checkpoint: Path, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Add tensors to a checkpoint, each in one piece."""
    save_file({**{f"weight/{name}": values for name, values in weights.items()},
               **{f"buffer/{name}": values for name, values in buffers.items()}}, checkpoint / RANK_0)
    write_json(checkpoint / "index.json", {"format": 1, "kinds": ["weight"], "parameters": {
        name: {"shape": [len(values)], "pieces": [{"box": [[0, len(values)]], "start": 0, "stop": len(values),
                                                   "file": RANK_0, "key": name}]}
        for name, values in weights.items()}})
    write_manifest(checkpoint, 3, [make_record(checkpoint / name) for name in ("state.json", "index.json", RANK_0)])


def test_several_models_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export two models, whose names are prefixes of their parameters, and NaN, extra state and code of a model."""
    checkpoint = write_checkpoint(tmp_path, {
        "a": ScriptModel(class_name="A", extra_state=("_extra_state",), tied={"v": "w"}),
        "b": ScriptModel(class_name="B", config={"auto_map": {"AutoModel": "mine.B"}})}, {})
    write_weights(checkpoint, {"a.w": torch.tensor([1.0, math.nan]), "b.w": torch.tensor([3.0])},
                  {"b.n": torch.tensor(5)})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "28 bytes of weights in 2 files" in printed
    assert "note: NaN or Inf in w, v" in printed
    assert "extra state of modules (_extra_state)" in printed
    assert "copy its .py files" in printed
    first, second = (load_file(tmp_path / "out" / name / "model.safetensors") for name in "ab")
    assert sorted(first) == ["v", "w"]
    assert (second["w"].tolist(), second["n"].item(), len(second)) == ([3.0], 5, 2)
    assert not (tmp_path / "out" / "a" / "config.json").exists()
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "model b         B of transformers, 1 parameter tensor, 1 buffer" in capsys.readouterr().out


def test_an_export_holds_one_parameter_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path, {"": ScriptModel(class_name="A")}, {})
    write_weights(checkpoint, {str(number): torch.ones(9) for number in range(20)}, {})
    read: list[weakref.ref[Tensor]] = []

    def watched(*arguments: Any) -> Tensor:
        assert sum(reference() is not None for reference in read) <= 1
        values = read_box(*arguments)
        read.append(weakref.ref(values))
        return values

    monkeypatch.setattr(script_export, "read_box", watched)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert len(read) == 20


def test_a_model_name_outside_of_the_export_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, {"../elsewhere": ScriptModel(class_name="A")}, {})
    assert run_command(main, ["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "must be a plain file name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LAYOUTS = ("ddp", "zero2", "zero3", "fsdp2")


@pytest.mark.full
def test_exports_from_two_ranks(tmp_path: Path) -> None:
    need_mpiexec()
    runs = [f"{kind}:{layout}" for kind in ("Odd", "gpt2", "llama", "qwen3", "vit", "unet", "norm")
            for layout in LAYOUTS]
    more = ["Odder:ddp", "WithExtraState:fsdp2", "qwen3:tp2", "qwen3:zero3+bf16", "gpt2:fsdp2+bf16", "frozen:zero3"]
    for name, (checkpoint, expected) in results_of(PROGRAM, tmp_path, [*runs, *more], 2).items():
        check_export(name, checkpoint, expected, tmp_path / name)


def weights_for_the_trainer(source: str) -> dict[str, Tensor]:
    with open_weights(find_source(source, "test")) as weights:
        return {name: weights.read(name, whole_box(shape))
                for name, shape in parameter_shapes(weights.model).items()}


@pytest.mark.full
def test_the_trainer_reads_a_scripts_weights_as_their_export(tmp_path: Path) -> None:
    need_mpiexec()
    for name, (checkpoint, _) in results_of(PROGRAM, tmp_path, [
            f"{kind}:{layout}" for kind in ("gpt2", "llama", "qwen3") for layout in ("zero3", "fsdp2")], 2).items():
        assert main(["export", checkpoint, str(tmp_path / name)]) == 0
        direct, exported = (weights_for_the_trainer(source) for source in (checkpoint, str(tmp_path / name)))
        assert direct.keys() == exported.keys()
        assert all(torch.equal(value, exported[key]) for key, value in direct.items())


@pytest.mark.full
def test_the_trainer_starts_from_a_scripts_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Train, evaluate and generate with a script's checkpoint as with its export."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    checkpoint, _ = in_one_process(tmp_path, "gpt2:ddp")["gpt2:ddp"]
    assert main(["export", checkpoint, "out"]) == 0
    common = ["--device", "cpu", "--tokenizer", "bytes"]
    printed = {}
    for name, source in (("script", checkpoint), ("export", "out")):
        assert train(["--init-from", source, "--corpus", "text.txt", "--steps", "3", "--run-dir", name,
                      *common]) == 0
        capsys.readouterr()
        assert evaluate(["val", source, "--corpus", "text.txt", *common]) == 0
        assert generate([source, "--prompt", "to be", "--tokens", "9", *common]) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        printed[name] = ([(line["loss"], line["grad_norm"]) for line in lines],
                         capsys.readouterr().out.replace(source, "SOURCE"))
    assert len(printed["script"][0]) == 3
    assert printed["script"][0] == printed["export"][0]
    assert printed["script"][1].replace(" (step 1)", "") == printed["export"][1]
