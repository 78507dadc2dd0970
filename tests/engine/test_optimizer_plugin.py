"""Optimizers of other packages: one file with an entry point; runs with them resume from checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
from places import ROOT
from slowness import scaled


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
    return _install(tmp_path / "installed", "lion", (ROOT / "examples/optimizers/lion.py").read_text())


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
    assert "unknown value of --optimizer 'lion'" in _train(tmp_path, bare, "--check", "--optimizer", "lion").stderr


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
    assert "unknown value of --optimizer 'lion'" in selected.stderr
