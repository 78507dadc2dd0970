"""Callbacks of another package: a metric and an evaluation in one file, with entry points, on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_runs import clean_env, need_mpiexec
from slowness import scaled
from tracker_files import tensorboard_curves

_NOISE = '''
import os

import torch
from ezpz_llm import Callback


def fail_if_asked(hook, context):
    if os.environ.get("FAIL") == f"{hook}:{context.dist.rank}":
        raise RuntimeError("out of noise")


class WeightNorm(Callback):
    def __init__(self):
        self.steps = 0

    def on_step_begin(self, context):
        fail_if_asked("on_step_begin", context)

    def on_step_end(self, context):
        self.steps += 1
        context.log("weight_norm", torch.stack([p.detach().norm() for p in context.module.parameters()]).norm())
        context.log("steps_seen", self.steps)
        fail_if_asked("on_step_end", context)

    def on_log(self, context, lines):
        fail_if_asked("on_log", context)
        for line in lines:
            line["loss_in_bits"] = line["loss"] * 1.4427
        context.print(f"noise: {context.tokens} tokens, logged to step {context.metrics['step']}")

    def on_save(self, context, folder):
        fail_if_asked("on_save", context)
        if context.dist.is_main:
            (context.dist.run_dir.path / f"saved-{folder.name}").touch()

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class ZerosLoss(Callback):
    def on_evaluate(self, context):
        fail_if_asked("on_evaluate", context)
        assert not context.module.training and not torch.is_grad_enabled()
        tokens = torch.zeros(1, 16, dtype=torch.long, device=context.dist.device)
        loss = context.module(tokens, tokens)
        torch.distributed.all_reduce(loss)
        context.log("zeros_loss", loss / context.dist.world_size)
'''
SMALL = ["--device", "cpu", "--n-layer", "1", "--n-embd", "32", "--block-size", "32", "--save-every", "3",
         "--eval-every", "3", "--log-every", "2", "--eval-tokens", "256", "--sample-tokens", "0", "--profile",
         "false", "--ds-config", "zero2", "--keep-last", "9"]


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Environment in which a package with that file is installed."""
    need_mpiexec()
    folder = tmp_path / "installed"
    (folder / "noise-1.0.dist-info").mkdir(parents=True)
    (folder / "noise.py").write_text(_NOISE)
    (folder / "noise-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: noise\nVersion: 1.0\n")
    (folder / "noise-1.0.dist-info/entry_points.txt").write_text(
        "[ezpz_llm.callbacks]\nweight_norm = noise:WeightNorm\nzeros = noise:ZerosLoss\n")
    return clean_env(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")


def _launch(cwd: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", sys.executable, "-m",
                           "ezpz_llm.train", *arguments], cwd=cwd, env=env, text=True, capture_output=True,
                          timeout=scaled(300), check=False)


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _state(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / f"checkpoints/step-{step:08d}/state.json").read_text())


def test_metric_and_evaluation_are_logged_and_resumed(tmp_path: Path, env: dict[str, str]) -> None:
    run = tmp_path / "run"
    done = _launch(tmp_path, env, *SMALL, "--steps", "6", "--track", "tensorboard", "--run-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "callbacks  weight_norm (noise 1.0), zeros (noise 1.0)\n" in done.stdout
    assert done.stdout.count("noise: ") == 5
    assert "noise: 1024 tokens, logged to step 4\n" in done.stdout
    lines = _lines(run)
    assert [line["steps_seen"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss_in_bits"] == line["loss"] * 1.4427 and line["weight_norm"] > 0 for line in lines)
    assert [line["step"] for line in lines if "zeros_loss" in line] == [3, 6]
    assert lines[5]["zeros_loss"] > 0
    curves = tensorboard_curves(run / "trackers/tensorboard")
    for name in ("weight_norm", "steps_seen", "zeros_loss"):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert curves[name] == pytest.approx(expected, rel=1e-6)
    assert json.loads((run / "run.json").read_text())["callbacks"] == {"weight_norm": "noise 1.0",
                                                                       "zeros": "noise 1.0"}
    assert sorted(path.name for path in run.glob("saved-*")) == ["saved-step-00000003", "saved-step-00000006"]
    assert _state(run, 3)["callbacks"] == {"weight_norm": {"steps": 3}}

    resumed = _launch(tmp_path, env, "--device", "cpu", "--resume", "run/checkpoints/step-00000003", "--run-dir",
                      "resumed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    again = _lines(tmp_path / "resumed")
    assert [(line["step"], line["steps_seen"]) for line in again] == [(4, 4), (5, 5), (6, 6)]
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[3:]]


@pytest.mark.parametrize("fault", ["on_step_end:1", *(pytest.param(fault, marks=pytest.mark.full) for fault in (
    "on_step_begin:0", "on_step_end:0", "on_log:0", "on_log:1", "on_evaluate:1", "on_save:1"))])
def test_error_on_one_rank_ends_all_ranks_with_its_message(tmp_path: Path, env: dict[str, str], fault: str) -> None:
    hook, rank = fault.split(":")
    done = _launch(tmp_path, {**env, "FAIL": fault}, *SMALL, "--steps", "6", "--save-async", "false", "--run-dir",
                   "run")
    assert done.returncode == 1, done.stdout + done.stderr
    name = "zeros" if hook == "on_evaluate" else "weight_norm"
    message = f"error: the callback {name} of noise 1.0 failed in {hook} on rank {rank}: RuntimeError: out of noise"
    for log in sorted((tmp_path / "run/logs").glob("rank*.log")):
        text = log.read_text()
        assert f"{message}\n  where:   {tmp_path}/installed/noise.py, line 10\n" in text, text
        assert "Traceback" not in text
        assert ("in fail_if_asked" in text) == log.name.endswith(f"{rank}.log")
    # Both ranks end at the same time, so launch may name either one as the first.
    assert re.search(r"rank [01]: the same\n", done.stderr), done.stderr
