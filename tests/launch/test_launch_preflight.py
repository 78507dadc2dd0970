"""`launch --preflight` starts the user's program only if the reservation passes the preflight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record
from slowness import scaled

CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
PROGRAM = "import os; open(os.path.join(os.environ['EZPZ_LLM_RUN_DIR'], 'started'), 'w'); print('it runs')"


def test_a_fit_reservation_gets_the_program(tmp_path: Path) -> None:
    done = launch(tmp_path, "--preflight", "-n", "2", "--run-dir", "r", sys.executable, "-c", PROGRAM, timeout=120,
                  **CALM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("preflight: fit") < done.stdout.index("it runs")
    assert json.loads((tmp_path / "r/preflight/preflight.json").read_text())["fit"] is True
    assert record(tmp_path / "r")["launch"]["command"][0] == sys.executable
    assert record(tmp_path / "r/preflight")["launch"]["world_size"] == 2


@pytest.mark.full
def test_an_unfit_one_does_not(tmp_path: Path) -> None:
    done = launch(tmp_path, "--preflight", "-n", "2", "--run-dir", "r", sys.executable, "-c", PROGRAM, timeout=120,
                  GLOO_SOCKET_IFNAME="eth9", **CALM)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "eth9" in done.stdout
    assert "launch: nothing was started: the preflight failed" in done.stderr
    assert "failed: exit code" not in done.stderr
    assert not (tmp_path / "r/started").exists()
    assert record(tmp_path / "r")["exit"]["code"] == 3
    told = subprocess.run([sys.executable, "-m", "ezpz_llm.why", "r"], cwd=tmp_path, env=clean_env(),
                          timeout=scaled(120), capture_output=True, text=True, check=True)
    assert "nothing was started: the preflight failed" in told.stdout
    assert left_over(tmp_path / "r") == left_over(tmp_path / "r/preflight") == {}
