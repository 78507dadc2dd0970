"""Acceptance of the library: training scripts of five models, killed, resumed, and exported, equal plain torch."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from five_models import RECIPES, SAVE_EVERY, STEPS, build, data_of, plain
from launch_runs import launch, left_over, need_mpiexec
from library_models import TRAININGS
from library_ranks import apart
from places import HELPERS
from safetensors.torch import load_file
from torch import nn

from ezpz_llm.checkpoint import main as checkpoint

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

CLASSES = {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM", "vit": "ViTForImageClassification"}
LAST_STEPS = {"ddp": 13, "zero2": 9, "fsdp2": 16}
"""Step after which the ranks are killed, 1 to 4 steps after a checkpoint."""
BOUND = 1e-6
"""Bound on recorded losses and gradient norms relative to plain torch in one process.

Measured over all models and layouts: 2.0e-7 for losses, 1.3e-7 in evaluations, 5.7e-7 for gradient norms, and 0 for
learning rates. Lost state of the optimizer or schedule, or other samples, differ by 3e-4 or more.
"""
WEIGHT_BOUND = 2e-6
"""Bound on the difference of a parameter to plain torch, relative to its 2-norm.

Measured: 8.3e-7 for a bias that starts near zero, 6.3e-7 for matrices.
"""
LEAST_CHANGE = 1e-3
"""Least change of a parameter in a training, relative to its 2-norm. Measured: 1.2e-3 for a norm of Qwen3."""


@functools.cache
def uninterrupted(name: str) -> tuple[list[dict[str, float]], nn.Module]:
    """Train a model with plain torch in this process; return the values of each step, and the model."""
    torch.set_num_threads(1)
    return plain(name)


def train(folder: Path, *words: str) -> tuple[int, str]:
    """Run the script on two ranks; return launch's exit code and its output."""
    done = launch(folder, "-n", "2", "--run-dir", "run", sys.executable, str(HELPERS / "five_models.py"), *words,
                  OMP_NUM_THREADS="1")
    assert not left_over(folder / "run")
    return done.returncode, done.stdout + done.stderr


def load_export(name: str, out: Path) -> nn.Module:
    """Load an export as its user would."""
    if name in CLASSES:
        import transformers

        model, info = getattr(transformers, CLASSES[name]).from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
        return model.eval()
    model = build(name)[0]
    model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    return model.eval()


@pytest.mark.full
@pytest.mark.parametrize("layout", LAST_STEPS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_and_resumed_run_equals_plain_torch(tmp_path: Path, name: str, layout: str) -> None:
    need_mpiexec()
    run_dir, last = tmp_path / "run", LAST_STEPS[layout]
    code, output = train(tmp_path, name, layout, str(last))
    assert code == 137, output
    resumed_after = last - last % SAVE_EVERY
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))[-1].endswith(f"{resumed_after}")
    code, output = train(tmp_path, name, layout)
    assert code == 0, output
    assert f"resuming after step {resumed_after}\n" in output

    curve, model = uninterrupted(name)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, values in zip(lines, curve, strict=True):
        assert line.keys() >= values.keys()
        for key, value in values.items():
            assert line[key] == pytest.approx(value, rel=BOUND, abs=0), (key, line["step"])

    assert checkpoint(["export", str(run_dir), str(tmp_path / "out")]) == 0
    exported = load_export(name, tmp_path / "out")
    state, first = exported.state_dict(), build(name)[0].state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, expected in model.state_dict().items():
        assert apart(state[key], expected) <= WEIGHT_BOUND, key
        assert apart(first[key], expected) >= LEAST_CHANGE, key
    with torch.no_grad():
        loss = TRAININGS[name].loss(exported, data_of(name)[1]).item()
    assert loss == pytest.approx(lines[-1]["val_loss"], rel=BOUND)
