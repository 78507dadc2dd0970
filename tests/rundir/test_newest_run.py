"""Tests of the default run of a command: the newest of the kind that it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_runs import make_run
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import ANY, LAUNCHED, TRAINING, WITH_STEPS, RunDir, append_line, newest_run, write_json
from ezpz_llm.core.rundir.newest import RunKind


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Folder with, from the oldest, a training run, a script's metrics, a failed launch and an evaluation."""
    folder = tmp_path / "runs"
    make_run(folder / "trained", range(1, 13))
    own = RunDir(folder / "own").create()
    append_line(own.metrics, {"step": 1, "loss": 1.0})
    failed = RunDir(folder / "failed").create()
    write_json(failed.record, {"launch": {"started": 1.0}, "exit": {"code": 1, "cause": "rank 0 failed"}})
    write_json(RunDir(folder / "evaluated").create().record, {"evaluation": {"val": {}}})
    for age, name in enumerate(("evaluated", "failed", "own", "trained")):
        for file in (folder / name).glob("*.json*"):
            os.utime(file, (2e9 - age, 2e9 - age))
    return folder


@pytest.mark.parametrize(("kind", "name"), [
    (WITH_STEPS, "own"), (TRAINING, "trained"), (LAUNCHED, "failed"), (ANY, "evaluated")])
def test_newest_run_of_each_kind(runs, kind, name, capsys):
    assert newest_run(runs, kind, "a command").path == runs / name
    note = f"note: reading {runs / name}; {runs / 'evaluated'} is newer, but not a {kind.name}\n"
    assert capsys.readouterr().err == (note if name != "evaluated" else "")


def test_message_if_no_run_fits(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="no run in "):
        newest_run(tmp_path / "runs", WITH_STEPS, "a command")
    make_run(tmp_path / "runs/one", range(1, 3))
    newest_run(tmp_path / "runs", WITH_STEPS, "a command")
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="no run of a kind in "):
        newest_run(tmp_path / "runs", RunKind("run of a kind", lambda run_dir, record: False), "a command")


def test_report_and_why_choose_their_own_kind_of_run(runs):
    for command, expected in (("report", "own"), ("why", "failed")):
        done = subprocess.run([sys.executable, "-m", f"ezpz_llm.{command}"], cwd=runs.parent, capture_output=True,
                              text=True, timeout=scaled(60), check=False)
        assert f"reading runs/{expected};" in done.stderr
