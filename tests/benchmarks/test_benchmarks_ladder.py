"""The ladder of optimizations: options of its rungs, and its table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT
from slowness import scaled

from ezpz_llm.training.trainer.options import parse

SCRIPT = ROOT / "benchmarks" / "ladder.py"


@pytest.fixture(scope="module")
def ladder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ladder", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ladder"] = module
    spec.loader.exec_module(module)
    return module


def test_each_rung_changes_one_thing(ladder: ModuleType) -> None:
    configs = {rung.name: parse(ladder.arguments("small", rung, 10)).config for rung in ladder.RUNGS}
    top = None
    for rung in ladder.RUNGS:
        config = configs[rung.name]
        changed = {name for name, value in vars(config).items() if top is not None and value != getattr(top, name)}
        assert len(changed) == len(rung.options) // 2, rung.name
        top = top if rung.alone else config
    assert top.loss_chunk is None
    assert (top.optimizer, top.attention, top.precision, top.compile) == ("adamw", "auto", "bf16_autocast", True)


def test_a_rung_that_learns_nothing_fails(ladder: ModuleType) -> None:
    run = {"wall_s": [0.1, 0.3, 0.2], "cpu_s": [0.2] * 3, "first_steps_s": [9.0], "losses": [5.0, 5.1, 4.9, 5.0],
           "tokens": 100, "flops": 1e9, "peak_flops": 1e11, "memory_bytes": 7}
    summary = ladder.summary([run, {**run, "memory_bytes": 8}])
    assert not summary["learns"]
    assert (summary["step_ms"], summary["memory_bytes"], summary["steps"]) == (200, 8, 6)
    assert summary["tokens_per_second"] == pytest.approx(500)
    assert summary["mfu"] == pytest.approx(1e9 / 0.2 / 1e11)
    assert "DOES NOT LEARN" in ladder.line("rung", summary)
    assert ladder.summary([{**run, "losses": [5.0, 4.0, 3.0, 2.0]}])["learns"]


@pytest.mark.full
def test_it_runs_each_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "ladder.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--work", "tiny", "--steps", "12", "--rounds", "1", "--rungs",
         "fp32,tf32,without compilation,bf16 parameters", "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=scaled(280), check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert "tf32" in result["rungs"]["tf32"]["refused"]
    plain, best = result["rungs"]["fp32"], result["rungs"]["without compilation"]
    assert plain["learns"]
    assert best["learns"]
    fall, other = (rung["loss_first"] - rung["loss_reached"] for rung in (plain, best))
    assert other == pytest.approx(fall, abs=0.1)  # not the losses, which more embedding rows raise
    assert result["rungs"]["bf16 parameters"]["learns"]
    assert "--precision bf16 " in result["options"]["bf16 parameters"]
    assert plain["memory_bytes"] > 0
