"""Checkpoints of another model or tokenizer: rejected before the first step, with one message and no new file.

Each planted checkpoint is a real one whose state.json records another setting, with the right hashes. Most of them
have tensors with the names and shapes of the run's model, so that only the record shows the difference.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Server
from launch_runs import clean_env, launch
from slowness import scaled
from small_tokenizers import mixed_text, trained

from ezpz_llm import checkpoint, evaluate, generate
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import write_json
from ezpz_llm.train import main
from ezpz_llm.training.checkpoint.manifest import STATE, make_record, read_json, read_manifest, write_manifest
from ezpz_llm.training.checkpoint.retention import find
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

TRAIN = ["--n-layer", "1", "--block-size", "32", "--eval-tokens", "64", "--sample-tokens", "0",
         "--profile", "false", "--micro-batch-size", "2", "--global-batch-size", "4", "--steps", "1",
         "--save-every", "0", "--precision", "fp32", "--device", "cpu", "--ds-config", "ddp"]
MODEL: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("llama", {"n_head": 2, "n_kv_head": 1, "head_dim": 64},
              "n_head is 2 in the checkpoint and 4 in this run"),
    "key/value heads": ("llama", {"n_kv_head": 4}, "n_kv_head is 4 in the checkpoint and 2 in this run"),
    "rotary base": ("llama", {"rope_theta": 10000.0},
                    "rope_theta is 10000.0 in the checkpoint and 500000.0 in this run"),
    "rotary scaling": ("llama", {"rope_factor": 8.0}, "rope_factor is 8.0 in the checkpoint and 1.0 in this run"),
    "rotary pairing": ("llama", {"rotary_pairing": "adjacent"},
                       "rotary_pairing is 'adjacent', but must be 'half'"),
    "head order": ("llama", {"qkv_order": "per head"}, "qkv_order is 'per head', but must be 'q, k, v'"),
    "untied head": ("llama", {"tied": False}, "tied is False in the checkpoint and True in this run"),
    "norm epsilon": ("llama", {"norm_eps": 1e-6}, "norm_eps is 1e-06 in the checkpoint and 1e-05 in this run"),
    "norm": ("llama", {"norm": None}, "norm is layernorm in the checkpoint and rmsnorm in this run"),
    "norm order": ("llama", {"norm_order": "after"}, "norm_order is after in the checkpoint and before"),
    "norm of queries": ("llama", {"qk_norm": "head"}, "qk_norm is head in the checkpoint and none in this run"),
    "sliding window": ("llama", {"window": 4096}, "window is 4096 in the checkpoint and 0 in this run"),
    "vocabulary under padding": ("llama", {"vocab_size": 701},
                                 "vocab_size is 701 in the checkpoint and 700 in this run"),
    "activation": ("gpt2", {"mlp": "gelu_erf"}, "mlp is gelu_erf in the checkpoint and gelu in this run"),
    "positions": ("gpt2", {"position": "rope"}, "position is rope in the checkpoint and learned in this run"),
    "a later version's setting": ("gpt2", {"logit_softcap": 30.0}, "unknown key 'logit_softcap'"),
}
"""Run, changed settings of its checkpoint (None: not recorded), and the message."""
TOKENIZER: dict[str, tuple[str, dict[str, Any], str]] = {
    "ids": ("llama", {"fingerprint": "0" * 64}, "tokens, end-of-text 1, fingerprint 000000000000)"),
    "end-of-text": ("llama", {"end_of_text": 0}, "tokens, end-of-text 0, fingerprint"),
}
CASES = [*(("model", *row) for row in MODEL.values()), *(("tokenizer", *row) for row in TOKENIZER.values())]
IDS = [*MODEL, *TOKENIZER]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two runs of one step: "llama", with a tokenizer of 700 tokens in a file, and "gpt2", on bytes."""
    folder = tmp_path_factory.mktemp("identity")
    (folder / "text.txt").write_text(mixed_text(20_000))
    for name, tokenizer in (("llama", str(trained("byte-level BPE"))), ("gpt2", "bytes")):
        shards = prepare(str(folder / "text.txt"), tokenizer, out=folder / f"{name}-tokens", progress=False)
        run(parse([*TRAIN, "--model", f"tiny-{name}", "--corpus", str(shards), "--run-dir", str(folder / name)]))
    return folder


def plant(original: Path, folder: Path, part: str, changes: dict[str, Any]) -> Path:
    """Copy a run, and change a part of its checkpoint's state.json and its hash."""
    shutil.copytree(original, folder)
    place = find(folder)
    state = read_json(place / STATE)
    state[part] = {name: value for name, value in {**state[part], **changes}.items() if value is not None}
    write_json(place / STATE, state)
    records = [make_record(place / record.name) for record in read_manifest(place)]
    write_manifest(place, state["step"], records)
    return folder


def files_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("part", "name", "changes", "message"), CASES, ids=IDS)
def test_the_check_rejects_a_planted_mismatch(part: str, name: str, changes: dict[str, Any], message: str,
                                              runs: Path, tmp_path: Path) -> None:
    run_dir = plant(runs / name, tmp_path / "run", part, changes)
    before = files_in(tmp_path)
    with pytest.raises(UserError) as caught:
        main(["--resume", str(run_dir), "--steps", "2", "--check"])
    assert message in caught.value.found
    assert caught.value.exit_code == 2
    assert str(find(run_dir)) in str(caught.value.where)
    assert caught.value.instead
    assert files_in(tmp_path) == before


@pytest.mark.full
@pytest.mark.parametrize(("part", "name", "changes", "message"), CASES, ids=IDS)
def test_launch_and_ranks_reject_a_planted_mismatch(part: str, name: str, changes: dict[str, Any], message: str,
                                                    runs: Path, tmp_path: Path, server: Server) -> None:
    """Start `launch`, which checks first, and ranks without that check."""
    run_dir = plant(runs / name, tmp_path / "run", part, changes)
    words = ["--resume", str(run_dir), "--steps", "2"]
    before = files_in(tmp_path)
    done = launch(tmp_path, "-n", "2", sys.executable, "-m", "ezpz_llm.train", *words)
    assert (done.returncode, done.stderr.count("error:"), message in done.stderr) == (2, 1, True), done.stderr
    assert files_in(tmp_path) == before
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    job = server.start(2, words, run_dir)
    assert job.wait() == [2, 2], job.output
    assert message in job.output
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
    assert [path.name for path in (run_dir / "checkpoints").glob("*step*")] == ["step-00000001"]


@pytest.mark.parametrize(("name", "changes", "options"), [
    ("llama", {"dropout": 0.1}, []), ("llama", {"init": "gpt2"}, []), ("gpt2", {"vocab_multiple": 320}, []),
    ("llama", {}, ["--block-size", "16"]), ("llama", {}, ["--block-size", "64"]),
    ("llama", {"qkv_order": None, "rotary_pairing": None}, [])])
def test_the_check_accepts_settings_that_may_change(name: str, changes: dict[str, Any], options: list[str],
                                                    runs: Path, tmp_path: Path) -> None:
    run_dir = plant(runs / name, tmp_path / "run", "model", changes)
    assert main(["--resume", str(run_dir), "--steps", "2", *options, "--check"]) == 0


@pytest.mark.parametrize("changes", [{"rotary_pairing": "adjacent"}, {"logit_softcap": 30.0}], ids=str)
def test_every_other_reader_rejects_a_planted_mismatch(changes: dict[str, Any], runs: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = str(plant(runs / "llama", tmp_path / "run", "model", changes))
    monkeypatch.chdir(tmp_path)
    before = files_in(tmp_path)
    for command, words in ((evaluate.main, ["val", run_dir]), (generate.main, [run_dir, "--prompt", "the"]),
                           (checkpoint.main, ["export", run_dir, "out"]),
                           (main, ["--init-from", run_dir, "--corpus", str(runs / "llama-tokens"), "--check"])):
        with pytest.raises(UserError, match="does not describe a model that this version supports") as caught:
            command(words)
        assert caught.value.exit_code == 2
        assert next(iter(changes)) in caught.value.found
        assert files_in(tmp_path) == before


@pytest.mark.full
def test_a_changed_config_json_of_the_initial_weights_is_not_read_on_resume(runs: Path, tmp_path: Path) -> None:
    """The checkpoint records the model. Its initial weights may be replaced or removed."""
    assert checkpoint.main(["export", str(runs / "llama"), str(tmp_path / "hf")]) == 0
    words = [*TRAIN[2:], "--corpus", str(runs / "llama-tokens"), "--run-dir", str(tmp_path / "run")]
    run(parse([*words, "--init-from", str(tmp_path / "hf")]))
    path = tmp_path / "hf" / "config.json"
    resume = ["--resume", str(tmp_path / "run"), "--steps", "2", "--check"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10000.0}))
    assert main(resume) == 0
    shutil.rmtree(tmp_path / "hf")
    assert main(resume) == 0
    assert main([*resume, "--init-from", "elsewhere"]) == 0


SCRIPT = """
import json, sys, torch, ezpz_llm
from transformers import LlamaConfig, LlamaForCausalLM
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
def wrapped(**changes):
    config = LlamaConfig(**SIZES, **{"num_attention_heads": 4, "tie_word_embeddings": True, **changes})
    model = LlamaForCausalLM(config)
    return ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()))
with ezpz_llm.setup(run_dir="run", device="cpu"):
    ezpz_llm.save_checkpoint(wrapped(), 1)
    for changes in json.loads(sys.argv[1]):
        try:
            ezpz_llm.load_checkpoint(wrapped(**changes))
            print("accepted")
        except ezpz_llm.UserError as error:
            print(error.found, "|", error.instead)
"""
SCRIPT_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "accepted"), ({"attention_dropout": 0.5, "max_position_embeddings": 64, "use_cache": False}, "accepted"),
    ({"eos_token_id": 7, "bos_token_id": 5, "sep_token_id": 6}, "accepted"),
    ({"num_attention_heads": 2}, "num_attention_heads is 4 in the checkpoint and 2 in model.config"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
     "rope_parameters.rope_theta is 10000.0 in the checkpoint and 500000.0 in model.config"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06 in the checkpoint and 1e-05 in model.config"),
    ({"hidden_act": "gelu"}, "hidden_act is 'silu' in the checkpoint and 'gelu' in model.config"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is True in the checkpoint and False in model.config"),
]


@pytest.mark.full
def test_a_script_rejects_a_checkpoint_of_another_hugging_face_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes = json.dumps([row[0] for row in SCRIPT_CASES])
    done = subprocess.run([sys.executable, "-c", SCRIPT, changes], cwd=tmp_path, text=True, check=False,
                          env={**clean_env(), "HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=scaled(120))
    lines = [line for line in done.stdout.splitlines() if "accepted" in line or "|" in line]
    assert len(lines) == len(SCRIPT_CASES), done.stdout + done.stderr
    for line, (case, expected) in zip(lines, SCRIPT_CASES, strict=True):
        assert expected in line, case
