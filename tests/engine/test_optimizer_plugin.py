"""Optimizers of other packages: one file with an entry point; runs with them resume from checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch_runs import clean_env, need_mpiexec
from muon import MUON
from places import HELPERS
from slowness import scaled

_LION = '''
from dataclasses import dataclass

from ezpz_llm.layout.optimizers import Optimizer


@dataclass(frozen=True)
class Lion(Optimizer):
    def unsupported_reason(self, layout):
        return "Lion has not been tried in a pipeline" if layout.pp > 1 else None

    def build(self, groups, settings, fused):
        import torch

        class Steps(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                        state["step"] = state.get("step", 0) + 1
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                        parameter.sub_(group["lr"] * average.lerp(parameter.grad, 1 - group["betas"][0]).sign())
                        average.lerp_(parameter.grad, 1 - group["betas"][1])

        return Steps(groups, settings)


LION = Lion("lion", "Lion (arXiv:2302.06675)", {"exp_avg": 4})
'''


def _install(folder: Path, name: str, source: str) -> dict[str, str]:
    """Install a package with one file, and return an environment with it."""
    (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (folder / f"{name}-1.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info/entry_points.txt").write_text(
        f"[ezpz_llm.optimizers]\n{name} = {name}:{name.upper()}\n")
    return clean_env(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    return _install(tmp_path / "installed", "lion", _LION)


@pytest.fixture(name="with_muon")
def _with_muon(tmp_path: Path) -> dict[str, str]:
    return _install(tmp_path / "installed", "muon", (HELPERS / "muon.py").read_text())


def _train(cwd: Path, env: dict[str, str], *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "ezpz_llm.launch", "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run([*launch, sys.executable, "-m", "ezpz_llm.train", "--device", "cpu", *arguments], cwd=cwd,
                          env=env, text=True, capture_output=True, timeout=scaled(500), check=False)


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.full), "zero2"])
def test_run_with_plugin_resumes_from_its_checkpoint(tmp_path: Path, env: dict[str, str], layout: str) -> None:
    whole = _train(tmp_path, env, "--n-layer", "1", "--block-size", "32", "--ds-config", layout, "--steps", "6",
                   "--optimizer", "lion", "--lr", "3e-4", "--schedule", "constant", "--save-every", "3",
                   "--eval-tokens", "0", "--sample-tokens", "0", "--profile", "false", "--run-dir", "whole",
                   "--verbose")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "Lion (arXiv:2302.06675), lr 0.0003" in whole.stdout
    middle = next((tmp_path / "whole/checkpoints").glob("*3"))
    again = _train(tmp_path, env, "--resume", str(middle), "--run-dir", "again")
    assert again.returncode == 0, again.stdout + again.stderr
    assert _losses(tmp_path / "again") == _losses(tmp_path / "whole")[3:]
    assert _losses(tmp_path / "whole")[-1] < _losses(tmp_path / "whole")[0]
    index = middle / "index.json"
    assert json.loads(index.read_text())["kinds"] == ["weight", "exp_avg"]


def test_plugin_is_checked_and_listed_like_built_in_optimizers(tmp_path: Path, env: dict[str, str]) -> None:
    pipeline = _train(tmp_path, env, "--check", "--world-size", "2", "--ds-config", "pp2", "--optimizer", "lion")
    assert pipeline.returncode == 2
    assert "Lion has not been tried in a pipeline" in pipeline.stderr
    assert "--optimizer lion" in pipeline.stderr
    offloaded = _train(tmp_path, env, "--check", "--ds-config", "zero3_offload_optimizer", "--optimizer", "lion")
    assert offloaded.returncode == 2
    assert "lion: Lion (arXiv:2302.06675)" in " ".join(_train(tmp_path, env, "--help-all").stdout.split())
    bare = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    assert "adamw_8bit" in _train(tmp_path, bare, "--check", "--optimizer", "lion").stderr


def test_broken_plugin_is_skipped_with_a_warning(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "installed/lion.py").write_text("import what_is_not_there\n")
    checked = _train(tmp_path, env, "--check")
    assert checked.returncode == 0, checked.stderr
    assert "warning: ignoring the entry point lion = lion:LION (ezpz_llm.optimizers): ModuleNotFoundError: " \
        "No module named 'what_is_not_there'" in checked.stderr
    assert "Traceback" not in checked.stderr
    selected = _train(tmp_path, env, "--check", "--optimizer", "lion")
    assert selected.returncode == 2
    assert "ignoring the entry point" in selected.stderr
    assert "adamw_8bit" in selected.stderr


@pytest.mark.full
def test_matrix_optimizer_resumes_under_another_layout(tmp_path: Path, with_muon: dict[str, str]) -> None:
    """Train with whole matrices under ddp, and continue with partitions of them under zero1, on two ranks."""
    need_mpiexec()
    whole = _train(tmp_path, with_muon, "--n-layer", "2", "--n-embd", "64", "--block-size", "32", "--ds-config",
                   "ddp", "--precision", "fp32", "--steps", "8", "--optimizer", "muon", "--lr", "2e-3",
                   "--schedule", "constant", "--save-every", "4", "--eval-tokens", "0", "--sample-tokens", "0",
                   "--profile", "false", "--run-dir", "whole", ranks=2)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    losses = _losses(tmp_path / "whole")
    assert losses[-1] < losses[0] - 0.5
    middle = next((tmp_path / "whole/checkpoints").glob("*4"))
    again = _train(tmp_path, with_muon, "--resume", str(middle), "--ds-config", "zero1", "--run-dir", "again",
                   ranks=2)
    assert again.returncode == 0, again.stdout + again.stderr
    assert _losses(tmp_path / "again") == pytest.approx(losses[4:], abs=1e-5)


def test_matrix_optimizer_orthogonalizes_the_matrices_of_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    names = ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"]
    params = [torch.nn.Parameter(torch.zeros(24, 16)) for _ in names]
    for parameter in params:
        parameter.grad = torch.randn(24, 16, generator=generator)
    MUON.build([{"params": params, "names": names, "weight_decay": 0.0}],
               {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8}, False).step()
    table, matrix = (parameter.detach() for parameter in params)
    assert table.abs().allclose(torch.ones(24, 16), atol=1e-4)
    values = torch.linalg.svdvals(matrix) / (0.2 * 24 ** 0.5)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "fsdp2"])
def test_matrix_optimizer_rejects_other_layouts(tmp_path: Path, with_muon: dict[str, str], layout: str) -> None:
    checked = _train(tmp_path, with_muon, "--check", "--world-size", "2", "--ds-config", layout, "--optimizer",
                     "muon")
    assert checked.returncode == 2
    assert "muon needs every matrix whole, or in flat partitions over all ranks (ddp, ZeRO 1 and 2); " \
        f"{layout} distributes matrices in another way\n" in checked.stderr
    assert "\n  where:   --optimizer muon\n  instead: --optimizer adamw" in checked.stderr
