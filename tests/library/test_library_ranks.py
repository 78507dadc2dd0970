"""Calls that every rank must make, and copies of parameters on tensor-parallel ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, need_mpiexec
from slowness import scaled

_START = """
import sys, torch, ezpz_llm
from torch import nn
from torch.nn.functional import dropout
run = ezpz_llm.setup(device="cpu", run_dir="run")
torch.manual_seed(0)
"""
ON_ONE_RANK = _START + """
import ezpz_llm.training.library.whole_parameters as whole
whole._PATIENCE_S = 3.0
model = nn.Linear(4, 4)
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), sys.argv[1])
if run.is_main:
    model.state_dict()
model.backward(model(torch.ones(2, 4)).mean())
model.step()
"""
EVALUATION_ON_ONE_RANK = _START + """
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), sys.argv[1])
for step in range(20):
    model.backward(model(torch.ones(2, 4)).mean())
    model.step()
if run.is_main:
    with torch.no_grad():
        model(torch.ones(2, 4))
model.backward(model(torch.ones(2, 4)).mean())
model.step()
"""
SKIPPED_LAYER = _START + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not (run.rank == 1 and number == 1):
                x = layer(x)
        return x
model = Net()
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), sys.argv[1])
model.backward(model(torch.ones(2, 4)).mean())
model.step()
"""
WEIGHTS_OF_EACH_RANK = _START + """
model = nn.Linear(4, 4)
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), sys.argv[1])
for step in range(4):
    model.backward(model(torch.ones(2, 4)).mean())
    model.step()
    with torch.no_grad():
        model.module.bias.add_(0.01 * run.rank)
"""
FOLDS = _START + """
import gc, weakref
for layout in ("ddp", "zero1", "zero2", "fsdp2"):
    modules = []
    for fold in range(5):
        module = nn.Linear(4, 4)
        model = ezpz_llm.wrap(module, torch.optim.AdamW(module.parameters()), layout)
        if layout in ("ddp", "fsdp2"):
            model.optimizer.register_step_post_hook(lambda *_, model=model: model.lr)
        model.backward(model(torch.ones(2, 4)).mean())
        model.step()
        modules.append(weakref.ref(module))
    print(layout, sum(module() is not None for module in modules))
"""
TENSOR_PARALLEL = _START + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        x = self.first(x)
        return self.down(self.up(dropout(x, 0.5) if sys.argv[2] == "dropout" else x).relu())
model = Net()
model = ezpz_llm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sys.argv[1],
                      tp_plan={"up": "colwise", "down": "rowwise"})
torch.manual_seed(run.rank)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
if sys.argv[2] == "samples":
    x = x + run.rank
model.backward(model(x).square().mean())
model.step()
print("stepped")
"""


def run_ranks(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess:
    need_mpiexec()
    (folder / "mine.py").write_text(script)
    return subprocess.run([shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable, "mine.py", *arguments],
                          cwd=folder, env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, text=True,
                          timeout=scaled(120), check=False)


def test_a_collective_call_on_one_rank_does_not_hang(tmp_path: Path):
    done = run_ranks(tmp_path, ON_ONE_RANK, "zero3")
    assert done.returncode != 0
    assert "model.state_dict() was called on rank 0, but not on rank 1" in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_weights_that_differ_between_ranks_are_an_error(tmp_path: Path, layout: str):
    done = run_ranks(tmp_path, WEIGHTS_OF_EACH_RANK, layout)
    assert done.returncode != 0
    assert re.search("ranks have different values of .*bias", done.stdout + done.stderr)


@pytest.mark.full
def test_models_of_earlier_folds_are_freed(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FOLDS)
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, env=clean_env(OMP_NUM_THREADS="1"),
                          capture_output=True, text=True, timeout=scaled(120), check=True)
    alive = dict(line.split() for line in done.stdout.splitlines()
                 if line.split(" ")[0] in ("ddp", "zero1", "zero2", "fsdp2"))
    assert len(alive) == 4
    assert max(map(int, alive.values())) <= 2, "the model of this fold, and the one that the name had before"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_an_evaluation_on_one_rank_does_not_hang(tmp_path: Path, layout: str):
    done = run_ranks(tmp_path, EVALUATION_ON_ONE_RANK, layout)
    assert done.returncode != 0
    assert ("this rank calls the model without gradients, but rank 1 calls the model with gradients"
            in done.stdout + done.stderr)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "fsdp2"])
def test_a_layer_that_one_rank_skips_does_not_hang(tmp_path: Path, layout: str):
    done = run_ranks(tmp_path, SKIPPED_LAYER, layout)
    assert done.returncode != 0
    assert "layers.1" in done.stdout + done.stderr
    assert "the same calls and learning rates on every rank" in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dropout", "samples", "right"])
def test_copies_of_parameters_are_compared(tmp_path: Path, kind: str):
    done = run_ranks(tmp_path, TENSOR_PARALLEL, "tp2", kind)
    if kind == "right":
        assert done.stdout.count("stepped") == 2, done.stderr
    else:
        assert done.returncode != 0
        assert "different copies after the first step of" in done.stdout + done.stderr
        assert "first.weight" in done.stdout + done.stderr
