"""Scripts of examples/, which differ from those of examples/unchanged in at most six lines."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, need_mpiexec
from places import ROOT

NEEDS = {"torch_ddp": "torch", "mpi4py_sum": "mpi4py", "deepspeed_zero2": "deepspeed",
         "accelerate_fit": "accelerate", "hf_trainer": "accelerate"}
MOST_CHANGED = 6


def changed(name: str) -> int:
    """Return the number of lines by which an example differs from the original script."""
    before, after = ([line for line in (folder / f"{name}.py").read_text().splitlines() if line]
                     for folder in (ROOT / "examples/unchanged", ROOT / "examples"))
    blocks = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return sum(max(a_end - a, b_end - b) for kind, a, a_end, b, b_end in blocks if kind != "equal")


def output_of(folder: Path, *arguments: object, timeout: float = 120) -> str:
    result = subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=folder,
                            env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=timeout,
                            check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_examples_change_at_most_six_lines():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == NEEDS.keys()
    for name in NEEDS:
        assert 0 < changed(name) <= MOST_CHANGED, name


def test_example_in_one_process(tmp_path: Path):
    """DistributedDataParallel needs a process group even for a single rank."""
    done = subprocess.run([sys.executable, ROOT / "examples/torch_ddp.py"], cwd=tmp_path, capture_output=True,
                          text=True, env=clean_env(OMP_NUM_THREADS="1"), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1, sum of weights " in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)  # DeepSpeed compiles an op once, which takes minutes
@pytest.mark.parametrize("name", NEEDS)
def test_example_under_launch(tmp_path: Path, name: str):
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed (the extra `test` has it)")
    need_mpiexec()
    output_of(tmp_path, "ezpz_llm.launch", "-n", 2, "--run-dir", "run", sys.executable,
              ROOT / f"examples/{name}.py", timeout=580)
    run_dir = tmp_path / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == ([1] if name == "mpi4py_sum" else [1, 2, 3])
    if name == "mpi4py_sum":
        assert lines[0]["loss"] == 3
    else:
        assert all(line["tokens_per_second"] > 0 and line["loss"] > 0 for line in lines)
    assert json.loads((run_dir / "run.json").read_text())["environment"]["world_size"] == 2
    assert "all ranks succeeded" in output_of(tmp_path, "ezpz_llm.why", run_dir)
    assert f"step {len(lines)} of {len(lines)}" in output_of(tmp_path, "ezpz_llm.report", run_dir)
    assert "2 ranks" in output_of(tmp_path, "ezpz_llm.explain", run_dir)
