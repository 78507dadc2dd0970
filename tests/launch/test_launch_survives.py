"""Corrupted run directories: launch ends with the cause's code and clears all nodes.

A program can write into its run directory, and a full disk can truncate files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import launch, left_over, start
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.diagnosis.postmortem import bare_postmortem, postmortem_of
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_PROGRAM = """
import json, os, pathlib, shutil, signal, subprocess, sys, time
rank, run = int(os.environ["EZPZ_LLM_RANK"]), pathlib.Path(os.environ["EZPZ_LLM_RUN_DIR"])
run_id = os.environ["EZPZ_LLM_RUN_ID"]
subprocess.Popen(["sleep", "600"], start_new_session=True)
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
time.sleep(1)
{damage}
time.sleep(1.5)
sys.exit(3)
"""

_DAMAGES = {
    "cut short": """
for name in ("errors/rank0000.json", "errors/rank0001.json", "control/stop", "control/stacks-1", "control/signal-1",
             "heartbeat/node0000.json", "run.json"):
    (run / name).write_text("{")
""",
    "of wrong types": """
for name in ("errors/rank0000.json", "control/stop", "control/stacks-1", "control/signal-1",
             "heartbeat/node0007.json"):
    for text in ('[1]', '{"run_id": 1}', json.dumps({"run_id": run_id, "ranks": 7, "token": [], "grace_s": "x"})):
        (run / name).write_text(text)
        time.sleep(0.2)
""",
    "of ranks that are none": """
(run / "heartbeat/node0007.json").write_text(json.dumps({"run_id": run_id, "host": "n9", "first_rank": 7,
    "state": "ended", "interval_s": 1.0, "ranks": {"1000000": {"ended": 9}, "-3": {"ended": 9}}}))
(run / "errors/rank1000000.json").write_text(json.dumps({"rank": 1000000, "host": "n9", "pid": 1, "exit_code": 9,
    "signal": None, "ended": 1.0, "duration_s": 1.0, "launch": run_id}))
""",
    "folders": """
for name in ("errors/rank0000.json", "errors/rank0001.json", "control/stop", "control/stacks-1", "control/signal-1",
             "heartbeat/node0007.json", "postmortem.txt"):
    (run / name).mkdir()
""",
    "away": """
for name in ("errors", "control", "heartbeat"):
    shutil.rmtree(run / name)
""",
    "away altogether": """
shutil.rmtree(run)
""",
}


@pytest.mark.full
@pytest.mark.parametrize("several", [list(_DAMAGES)[:3], list(_DAMAGES)[3:]], ids=["files", "folders"])
def test_the_cause_keeps_its_code(tmp_path: Path, several: list[str]) -> None:
    runs = {}
    for number, what in enumerate(several):
        (tmp_path / f"{number}.py").write_text(_PROGRAM.format(damage=_DAMAGES[what]))
        (tmp_path / f"r{number}").mkdir()
        runs[number] = start(tmp_path, "-n", "2", "--run-dir", f"r{number}", sys.executable, f"{number}.py")
    said = {number: run.communicate(timeout=scaled(90))[1] for number, run in runs.items()}
    for number, what in enumerate(several):
        assert "Traceback" not in said[number], f"{what}\n{said[number]}"
        assert runs[number].returncode == 3, f"{what}\n{said[number]}"
        assert f"rank 1 on {os.uname().nodename} failed: exit code 3" in said[number], f"{what}\n{said[number]}"
        assert "may be left" not in said[number], f"{what}\n{said[number]}"
        if what not in ("cut short", "away altogether"):
            assert left_over(tmp_path / f"r{number}") == {}, what
            assert json.loads((tmp_path / f"r{number}/run.json").read_text())["exit"]["code"] == 3


@pytest.mark.parametrize(("stopped", "status", "code"), [
    (None, 7, 7), (None, 0, 0), (None, -9, 137), (Stop("rank", "a rank failed"), 143, 143),
    (Stop("idle", "no sign of life"), 143, 124), (Stop("signal", "launch received SIGINT", "SIGINT"), 1, 130),
    (Stop("late", "a rank did not start"), 1, 124), (Stop("refused", "a rank cannot start"), 1, 3)])
def test_messages_for_a_directory_without_valid_files(tmp_path: Path, stopped: Stop | None, status: int,
                                                code: int) -> None:
    (tmp_path / "errors").write_text("x")
    facts = RunFacts(2, ("n1", "n1"), "srun", status, 1000.0, stopped)
    assert bare_postmortem(RunDir(tmp_path), "id", facts).code == code


def test_a_clock_that_was_set_back_does_not_hide_logs(tmp_path: Path) -> None:
    """Logs from before the run's start would belong to an earlier run, judging by the clock."""
    run_dir = RunDir(tmp_path / "r").create()
    run_dir.record.write_text(json.dumps({"launch": {"started": 10_000.0, "env": {"EZPZ_LLM_RUN_ID": "id"}}}))
    run_dir.launcher_log.write_text("srun: error: Node failure on n2\n")
    os.utime(run_dir.launcher_log, (6500, 6500))
    for ended, kind in ((6600.0, "node_failed"), (20_000.0, "launcher")):
        facts = RunFacts(2, ("n1", "n2"), "srun", 143, ended)
        assert postmortem_of(run_dir, facts).kind == kind


@pytest.mark.parametrize("unit", ["x", " ", "1 ", "- "])
def test_a_log_of_one_long_line_does_not_delay_the_end(tmp_path: Path, unit: str) -> None:
    """The search for messages of MPI_Abort and others took minutes on such a line, at the end of a run."""
    run_dir = RunDir(tmp_path / "r").create()
    run_dir.record.write_text(json.dumps({"launch": {"started": 1.0, "env": {"EZPZ_LLM_RUN_ID": "id"}}}))
    for path in (run_dir.launcher_log, run_dir.rank_log(0), run_dir.rank_log(1)):
        path.write_text(unit * (1 << 16) + "\n" + unit * (1 << 15) + "\n")
    began = time.process_time()
    ended = postmortem_of(run_dir, RunFacts(2, ("n1", "n2"), "mpiexec", 7, 2.0))
    assert time.process_time() - began < scaled(5)
    assert ended.code == 7


def test_an_unreadable_log_does_not_change_the_code(tmp_path: Path) -> None:
    """launch prints short logs of other ranks at the end. Here a folder replaces an unreadable log."""
    damage = "test $EZPZ_LLM_RANK = 0 || { cd r/logs && rm rank0001.log && mkdir -p rank0001.log/x; }"
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", "sh", "-c", damage)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("make", [lambda log, other: log.symlink_to(other), lambda log, other: os.mkfifo(log),
                                  lambda log, other: log.mkdir()], ids=["link", "pipe", "folder"])
def test_a_launcher_log_that_is_no_file_is_not_written(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    (tmp_path / "other").write_text("kept")
    log = RunDir(tmp_path / "r").create().launcher_log
    log.parent.mkdir(exist_ok=True)
    make(log, tmp_path / "other")
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    assert done.returncode == 3
    assert "error: cannot write the launcher's log: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "other").read_text() == "kept"
    assert left_over(tmp_path / "r") == {}
