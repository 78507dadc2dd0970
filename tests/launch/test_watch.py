"""`ezpz-llm watch` of running jobs, through a restart, and of incomplete files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, append_line, write_json
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.diagnosis.status import Status, read_status
from ezpz_llm.watch import format_block, format_line, main

ENV = {**os.environ, "TERM": "dumb", "COLUMNS": "80"}


def start(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    """Start two ranks of heartbeat_ranks.py under launch."""
    return subprocess.Popen([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(run_dir),
                             sys.executable, str(HELPERS / "heartbeat_ranks.py"), *words],
                            env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def look(run_dir: Path, *words: str) -> str:
    """Run `watch --once`."""
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.watch", str(run_dir), "--once", *words], env=ENV,
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_live_run_is_followed_through_a_restart_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = start(run_dir, "1000", "0.2", "7")
    deadline = time.monotonic() + scaled(60)
    # A step can be written before the rank's phase.
    while not (run_dir / "metrics.jsonl").exists() or json.loads(look(run_dir, "--json"))["phase"] != "training":
        assert time.monotonic() < deadline
        assert first.poll() is None
    with subprocess.Popen([sys.executable, "-m", "ezpz_llm.watch", str(run_dir)], env=ENV, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as watch:
        assert watch.stdout is not None
        seen = watch.stdout.readline()
        found = json.loads(look(run_dir, "--json"))
        assert (found["state"], found["phase"], found["steps"], found["ranks"]) == ("running", "training", 2000, 2)
        assert found["left_s"] == pytest.approx((2000 - found["step"]) * 0.2)
        assert found["last_words"] == "here are the last words"
        assert found["tokens_per_second"] == pytest.approx(10240)
        (run_dir / "stop").touch()
        assert first.wait(scaled(60)) == 7
        while "waiting" not in seen:
            seen += watch.stdout.readline()
        (run_dir / "stop").unlink()
        second = start(run_dir, "5", "0.2", "0")
        assert second.wait(scaled(60)) == 0
        told = seen + watch.communicate(timeout=scaled(60))[0]
    assert watch.returncode == 0
    assert "failed after" in told
    assert "with code 7" in told
    assert "waiting 120 s for a restart" in told
    assert "succeeded" in told
    assert "\x1b" not in told


def test_why_of_a_live_run_names_watch(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = start(run_dir, "1000", "0.05", "0")
    try:
        deadline = time.monotonic() + scaled(60)
        while not (run_dir / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.1)
        done = subprocess.run([sys.executable, "-m", "ezpz_llm.why", str(run_dir)], env=ENV, capture_output=True,
                              text=True, timeout=scaled(60), check=False)
        assert f"to monitor it: ezpz-llm watch {run_dir}" in done.stdout
    finally:
        job.terminate()
        job.wait(60)


def test_an_incomplete_record_still_gives_a_status(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    write_json(run_dir.record, {})
    assert read_status(run_dir, 30.0).state == "running", "without launch nothing tells of its end"
    for step in range(1, 4):
        append_line(run_dir.metrics, {"step": step, "loss": None, "step_time_s": 0.5, "tokens_per_second": 100.0})
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    found = read_status(run_dir, 30.0)
    assert (found.step, found.loss, found.step_s) == (3, None, 0.5)
    update_record(run_dir, exit={"code": 3, "cause": "n2 is unfit", "ended": time.time()})
    assert "failed with code 3: n2 is unfit" in format_block(run_dir, read_status(run_dir, 30.0), 80)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_output_fits_the_terminal(width: int, tmp_path: Path) -> None:
    status = Status("running", 3731.0, "training", 350, 1500, left_s=2669.0, loss=2.6818, loss_step=350,
                    val_loss=2.469, tokens_per_second=36_200.0, step_s=0.0565, ranks=8,
                    slowest={"rank": 5, "host": "n3", "steps_behind": 4}, silent=(5,), last_words="x " * 50)
    text = format_block(RunDir(Path("/runs/a")), status, width)
    assert all(len(line) <= width for line in text.splitlines())
    for word in ("training", "350 of 1500 (23%)", "44:29 left", "2.6818 at step 350", "36.2k tokens/s", "56.5 ms",
                 "rank 5 on n3, 4 steps behind", "ezpz-llm why"):
        assert word in " ".join(text.split())
    assert format_line(status).count("\n") == 0


def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="no run in runs/"):
        main([])
