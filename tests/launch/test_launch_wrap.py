"""--wrap: a container command around each rank's command.

A script that executes its arguments stands in for apptainer; docs/reference/launchers.md describes the real one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launch_runs import launch
from places import HELPERS

PROGRAM = (sys.executable, str(HELPERS / "reporting_ranks.py"))

# apptainer exec IMAGE COMMAND…
_STAND_IN = """#!/bin/sh
[ "$1" = exec ] || { echo "apptainer: unknown command $1" >&2; exit 255; }
echo "$*" >> "$CALLS"
WRAPPED=$2
export WRAPPED
shift 2
exec "$@"
"""


@pytest.fixture
def container(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the stand-in `apptainer`, which records its calls in `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(_STAND_IN)
    (folder / "apptainer").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "CALLS": str(tmp_path / "calls")}


def test_each_rank_runs_behind_the_wrapping_words(tmp_path: Path, container: dict[str, str]) -> None:
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", "--wrap", "apptainer exec 'my image.sif'", *PROGRAM,
                  "report", "a b", "$(x)", "", **container)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        report = json.loads((tmp_path / f"r/logs/rank{rank:04d}.log").read_text())
        assert (report["rank"], report["env"]["WRAPPED"]) == (rank, "my image.sif")
        assert report["argv"] == ["report", "a b", "$(x)", ""]
    failed = launch(tmp_path, "-n", "2", "--run-dir", "f", "--wrap", "apptainer exec x.sif", "sh", "-c",
                    "exit 7", **container)
    assert failed.returncode == 7, failed.stderr
    refused = launch(tmp_path, "-n", "2", "--run-dir", "w", "--wrap", "apptainer run x.sif", *PROGRAM, "report",
                     **container)
    assert refused.returncode == 255, refused.stderr
    assert "apptainer: unknown command run" in refused.stderr


def test_the_check_before_the_start_runs_behind_them_too(tmp_path: Path, container: dict[str, str]) -> None:
    wrap = ("-n", "2", "--wrap", "apptainer exec x.sif")
    train = (sys.executable, "-m", "ezpz_llm.train")
    done = launch(tmp_path, *wrap, *train, "--no-such-option", "3", **container)
    assert done.returncode == 2, done.stderr
    assert "no-such-option" in done.stderr
    assert "nothing was started" in done.stderr
    [call] = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("ezpz_llm.train --no-such-option 3 --check --world-size 2")
    plan = json.loads(launch(tmp_path, "--dry-run", "--json", *wrap, *train, **container).stdout)
    assert Path(plan["run_dir"]).name.startswith("train-")
    assert plan["argv"][-6:] == ["apptainer", "exec", "x.sif", *train]


def test_a_missing_wrapper(tmp_path: Path, container: dict[str, str]) -> None:
    train = (sys.executable, "-m", "ezpz_llm.train")
    missing = launch(tmp_path, "-n", "2", "--wrap", "no-such-container exec", *train, **container)
    assert (missing.returncode, "no-such-container" in missing.stderr) == (127, True), missing.stderr
    (tmp_path / "bin/apptainer").chmod(0o644)
    denied = launch(tmp_path, "-n", "2", "--wrap", str(tmp_path / "bin/apptainer"), *train, **container)
    assert (denied.returncode, "Permission denied" in denied.stderr) == (126, True), denied.stderr
    assert "Traceback" not in missing.stderr + denied.stderr
