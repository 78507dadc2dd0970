"""Errors that one rank raises on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.agreement import run_together


def test_exception_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """launch names the rank with the exception, whichever rank ends first."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(tmp_path / "run"),
               sys.executable, str(HELPERS / "agreement_ranks.py"), str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    stopping = "stopping, because rank 1 failed with an exception (KeyError)"
    assert str([f"PeerFailedError: {stopping}", "KeyError: 'planted'"]) in done.stdout, done.stdout + done.stderr
    assert str(["UserError: planted for the user", "KeyError: 'planted'"]) in done.stdout
    assert done.returncode == 1
    logs = [(tmp_path / f"run/logs/rank{rank:04d}.log").read_text() for rank in range(2)]
    assert f"error: {stopping}" in logs[0]
    assert "instead: see the output of rank 1" in logs[0]
    assert "Traceback" not in logs[0]
    assert "in fail_on_rank_1" in logs[1]
    why = subprocess.run([sys.executable, "-m", "ezpz_llm.why", str(tmp_path / "run")], capture_output=True,
                         text=True, timeout=scaled(60), check=False)
    assert "launch: rank 1 on " in why.stdout, why.stdout
    assert "peer lost (failed with an exception): 0" in why.stdout


def test_preparation_on_rank_0_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(tmp_path / "run"),
               sys.executable, str(HELPERS / "long_action_ranks.py"), str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str([("prepared", "there is no corpus"), (None, "there is no corpus")]) in done.stdout


def test_single_rank_keeps_its_exception_and_its_cause(tmp_path: Path) -> None:
    alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), None, None, Mesh(Degrees(1), 0), RunDir(tmp_path))

    def fail() -> None:
        try:
            raise OSError("cause")
        except OSError as cause:
            raise KeyError("planted") from cause

    with pytest.raises(KeyError) as caught:
        run_together(alone, fail)
    assert isinstance(caught.value.__cause__, OSError)
