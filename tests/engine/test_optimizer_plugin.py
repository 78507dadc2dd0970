"""Optimizer of another package: one file with an entry point; runs with it resume from checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
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


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Environment in which a package with that file is installed."""
    folder = tmp_path / "installed"
    (folder / "lion-1.0.dist-info").mkdir(parents=True)
    (folder / "lion.py").write_text(_LION)
    (folder / "lion-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: lion\nVersion: 1.0\n")
    (folder / "lion-1.0.dist-info/entry_points.txt").write_text("[ezpz_llm.optimizers]\nlion = lion:LION\n")
    return clean_env(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")


def _train(cwd: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.train", "--device", "cpu", *arguments], cwd=cwd, env=env,
                          text=True, capture_output=True, timeout=scaled(500), check=False)


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
