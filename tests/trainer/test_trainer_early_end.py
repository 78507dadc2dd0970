"""Early end of runs by a signal or the end of the reservation, with a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_runs import LONG
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.launcher.basics.messages import StopOrder, order_stop
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.report.runs import load_runs
from ezpz_llm.training.trainer.early_end import SIGNALS, Agreed, EarlyEnd

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}


def start(run_dir: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(run_dir),
               sys.executable, "-m", "ezpz_llm.train", *LONG]
    return subprocess.Popen(command, env=ENV | env, cwd=run_dir.parent, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def rank_process(run_dir: Path, rank: int) -> int:
    """Return the PID of the training process of `rank`, not of its shim."""
    marker = read_record(RunDir(run_dir)).launch.env["EZPZ_LLM_RUN_ID"].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (b"EZPZ_LLM_RUN_ID=" + marker in environ and b"PMI_RANK=%d" % rank in environ
                and b"ezpz_llm.train" in words and b"ezpz_llm.launcher.on_nodes.shim" not in words):
            return int(folder.name)
    raise AssertionError(f"rank {rank} is not running")


def check_stopped(run_dir: Path, out: str, reason: str) -> None:
    record = read_record(RunDir(run_dir))
    step = record.steps
    assert 0 < step < 100000
    assert record.exit.code == 0
    assert reason in record.stopped
    assert f"stopped after step {step} of 100000: {record.stopped}" in out
    assert f" --resume {run_dir.name}\n" in out
    assert [line["step"] for line in read_lines(RunDir(run_dir).metrics)] == list(range(1, step + 1))
    assert complete_checkpoints(run_dir / "checkpoints")[-1].name == f"step-{step:08d}"


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
def test_ctrl_c_prints_a_reply_at_once_and_is_reported_as_an_interrupt(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = start(run_dir)
    deadline = time.monotonic() + scaled(100)
    while not any("training" in path.read_text() for path in (run_dir / "heartbeat").glob("node*.json")):
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=scaled(100))
    assert running.returncode == 130, out + err
    answer = "launch: SIGINT: saving and stopping after this step (within 10 s); press ^C again to stop now"
    assert answer in err
    record = read_record(RunDir(run_dir))
    assert record.stopped == "interrupted by Ctrl-C (SIGINT)"
    assert f"stopped after step {record.steps} of 100000: {record.stopped}" in out
    assert "over step" not in out, "the charts are in plots/"
    assert (out + err).count("--resume") == 1, "only launch prints the command that resumes"
    assert load_runs([run_dir])[0].state.startswith(f"stopped after step {record.steps} of 100000: interrupted")


@pytest.mark.full
def test_the_reservations_end_is_seen_in_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ends_at = time.time() + 44
    running = start(run_dir, EZPZ_LLM_ENDS_AT=f"{ends_at:.0f}")
    out, err = running.communicate(timeout=scaled(100))
    assert running.returncode == 0, out + err
    assert time.time() < ends_at - 5
    check_stopped(run_dir, out, "the allocation ends at")


def test_setting_the_clock_does_not_shorten_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {"EZPZ_LLM_ENDS_AT": f"{real() + 3600:.0f}"})
    clock = WallClock()
    clock.passed("one part")
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    assert early_end.agree(1) == Agreed(None, busy=False)
    clock.passed("the next")
    assert 0 <= clock.marks[1][1] - clock.marks[0][1] < 60
    monkeypatch.setattr(early_end, "_agree_after", 0)
    monkeypatch.setattr(early_end, "_ends_at_monotonic", time.monotonic() + scaled(10))
    assert early_end.agree(2).reason.startswith("the allocation ends at")


def test_a_resumed_run_agrees_again_soon_after_its_first_step() -> None:
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {})
    time.sleep(0.05)
    assert early_end.agree(10_001) == Agreed(None, busy=False)
    early_end._handle_signal(signal.SIGTERM, None)
    assert early_end.agree(10_100) == Agreed("SIGTERM was received", busy=False)


def test_a_save_is_busy_until_all_ranks_have_written() -> None:
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1), {})
    assert early_end.agree(1, busy=True) == Agreed(None, busy=True)


@pytest.fixture
def listening() -> Iterator[EarlyEnd]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield EarlyEnd(SimpleNamespace(device="cpu", world_size=1, is_main=True), {}).listen()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_without_launch_stops_after_the_step_and_the_second_one_at_once(
        listening: EarlyEnd, capfd: pytest.CaptureFixture[str]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nsaving and stopping after this step; press ^C again to stop now\n"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert listening.agree(1) == Agreed("interrupted by Ctrl-C (SIGINT)", busy=False)


@pytest.mark.parametrize(("received", "reason"), [
    ("SIGINT", "interrupted by Ctrl-C (SIGINT)"), ("SIGHUP", "SIGHUP was received"), ("", "SIGTERM was received")])
def test_the_signal_that_launch_received_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       received: str, reason: str) -> None:
    """launch sends its ranks SIGTERM, whatever signal it received."""
    run_dir = RunDir(tmp_path / "run").create()
    order_stop(run_dir, StopOrder("me", 10.0, "", received=received))
    monkeypatch.setenv(RUN_ID_VARIABLE, "me")
    early_end = EarlyEnd(SimpleNamespace(device="cpu", world_size=1, is_main=True, run_dir=run_dir), {})
    early_end._handle_signal(signal.SIGTERM, None)
    assert early_end.agree(1) == Agreed(reason, busy=False)
