"""Runs that end before their last step, by a signal or the reservation's end: in order, with a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_runs import LONG
from slowness import scaled

from ezpz_llm.checkpoint.manifest import complete
from ezpz_llm.observe import WallClock
from ezpz_llm.rundir import RunDir, read_lines, read_record
from ezpz_llm.trainer.early_end import Agreed, EarlyEnd

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}


def start(run_dir: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(run_dir),
               sys.executable, "-m", "ezpz_llm.train", *LONG]
    return subprocess.Popen(command, env=ENV | env, cwd=run_dir.parent, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def rank_process(run_dir: Path, rank: int) -> int:
    """The process that trains as `rank`, not its shim."""
    marker = read_record(RunDir(run_dir))["launch"]["env"]["EZPZ_LLM_RUN_ID"].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (b"EZPZ_LLM_RUN_ID=" + marker in environ and b"PMI_RANK=%d" % rank in environ
                and b"ezpz_llm.train" in words and b"ezpz_llm.launch.shim" not in words):
            return int(folder.name)
    raise AssertionError(f"rank {rank} is not running")


def check_stopped(run_dir: Path, out: str, why: str) -> None:
    record = read_record(RunDir(run_dir))
    step = record["steps"]
    assert 0 < step < 100000
    assert record["exit"]["code"] == 0
    assert why in record["stopped"]
    assert f"stopped after step {step} of 100000: {record['stopped']}" in out
    assert f"--resume {run_dir}" in out
    assert [line["step"] for line in read_lines(RunDir(run_dir).metrics)] == list(range(1, step + 1))
    assert complete(run_dir / "checkpoints")[-1].name == f"step-{step:08d}"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    running = start(run_dir)
    deadline = time.monotonic() + scaled(100)
    while not (run_dir / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    os.kill(rank_process(run_dir, 1), number)
    out, err = running.communicate(timeout=scaled(100))
    assert running.returncode == 0, out + err
    check_stopped(run_dir, out, f"{number.name} was received")


@pytest.mark.full
def test_the_reservations_end_is_seen_in_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ends_at = time.time() + 44
    running = start(run_dir, EZPZ_LLM_ENDS_AT=f"{ends_at:.0f}")
    out, err = running.communicate(timeout=scaled(100))
    assert running.returncode == 0, out + err
    assert time.time() < ends_at - 5
    check_stopped(run_dir, out, "the reservation ends at")


def test_a_clock_that_is_set_makes_no_reservation_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {"EZPZ_LLM_ENDS_AT": f"{real() + 3600:.0f}"})
    clock = WallClock()
    clock.passed("one part")
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    assert early_end.agreed(1) == Agreed(None, busy=False)
    clock.passed("the next")
    assert 0 <= clock.marks[1][1] - clock.marks[0][1] < 60
    monkeypatch.setattr(early_end, "_ask_after", 0)
    monkeypatch.setattr(early_end, "_over_at", time.monotonic() + scaled(10))
    assert early_end.agreed(2).ends.startswith("the reservation ends at")


def test_a_resumed_run_asks_again_soon_after_its_first_step() -> None:
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {})
    time.sleep(0.05)
    assert early_end.agreed(10_001) == Agreed(None, busy=False)
    early_end._note(signal.SIGTERM, None)
    assert early_end.agreed(10_100) == Agreed("SIGTERM was received", busy=False)


def test_a_save_is_known_to_be_written_only_by_all() -> None:
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {})
    assert early_end.agreed(1, busy=True) == Agreed(None, busy=True)
