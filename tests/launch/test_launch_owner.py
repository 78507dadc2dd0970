"""A run directory has one owner at a time: real launches, concurrent and one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record, start
from simcluster.cluster import Cluster
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.addresses import free_port
from ezpz_llm.launcher.basics.processes import pid_namespace_id
from ezpz_llm.launcher.jobs import owner
from ezpz_llm.launcher.jobs.owner import Owner, become_owner

_ELSEWHERE = Owner("0123456789abcdef", "n9", 1, 1, "another boot", "", 0, 1.7e9)


def _wait_for(path: Path) -> None:
    _wait_until(path.exists)


def _wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(60)
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _until(path: str) -> tuple[str, ...]:
    """Return a program that reports that it is running, and ends once `path` exists."""
    return "sh", "-c", f"touch {path}.runs; while [ ! -e {path} ]; do sleep 0.05; done"


def _owned_by(run_dir: Path, who: Owner) -> Path:
    file = RunDir(run_dir).create().control / "owner.json"
    file.write_text(json.dumps(asdict(who)))
    return file


def test_one_of_two_concurrent_launches_runs(tmp_path: Path) -> None:
    both = [start(tmp_path, "-n", "1", "--run-dir", "r", *_until("end")) for _ in range(2)]
    _wait_for(tmp_path / "end.runs")
    while all(process.poll() is None for process in both):
        time.sleep(0.02)
    other, refused = sorted(both, key=lambda process: process.poll() is not None)
    _, stderr = refused.communicate(timeout=scaled(60))
    assert refused.returncode == 2, stderr
    assert f"the run directory is in use: launch, pid {other.pid} on " in stderr
    assert f"end it (kill {other.pid})" in stderr
    (tmp_path / "end").touch()
    _, stderr = other.communicate(timeout=scaled(60))
    assert other.returncode == 0, stderr
    assert record(tmp_path / "r")["exit"]["code"] == 0


def test_a_second_launch_does_not_end_the_first(tmp_path: Path) -> None:
    first = start(tmp_path, "-n", "2", "--run-dir", "r", *_until("end"))
    _wait_for(tmp_path / "end.runs")
    before = record(tmp_path / "r")
    second = launch(tmp_path, "-n", "2", "--run-dir", "r", "sh", "-c", "touch second; exit 7")
    assert second.returncode == 2, second.stderr
    assert "in use" in second.stderr
    assert "instead:" in second.stderr
    train = launch(tmp_path, "-n", "1", sys.executable, "-m", "ezpz_llm.train", "--run-dir", "r", "--resume", "r")
    assert (train.returncode, "in use" in train.stderr) == (2, True), "the reason is not what its check finds"
    assert record(tmp_path / "r") == before
    # The record of another run's rank does not count as a failure.
    (tmp_path / "r/errors/rank0001.json").write_text('{"rank": 1, "exit_code": 7, "launch": "another"}')
    (tmp_path / "r/errors/rank0000.json").write_text("{")
    time.sleep(0.5)
    (tmp_path / "end").touch()
    _, stderr = first.communicate(timeout=scaled(60))
    assert first.returncode == 0, stderr
    assert not (tmp_path / "second").exists()
    again = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    assert (again.returncode, "taking over" in again.stderr) == (0, False), "it was let go of"


def test_a_killed_launch_is_replaced(tmp_path: Path) -> None:
    first = start(tmp_path, "-n", "2", "--run-dir", "r", *_until("never"))
    _wait_for(tmp_path / "never.runs")
    first.kill()
    first.communicate(timeout=scaled(120))
    second = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    assert second.returncode == 0, second.stderr
    assert f"taking over the run directory {tmp_path}/r from launch, pid {first.pid} on " in second.stderr
    assert "that process has ended" in second.stderr
    assert left_over(tmp_path / "r") == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_launch_releases_the_directory(tmp_path: Path, number: signal.Signals) -> None:
    first = start(tmp_path, "-n", "1", "--run-dir", "r", *_until("never"))
    _wait_for(tmp_path / "never.runs")
    first.send_signal(number)
    first.communicate(timeout=scaled(60))
    second = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    assert (second.returncode, "taking over" in second.stderr) == (0, False), second.stderr


@pytest.mark.full
def test_rank_0_owns_the_directory_where_there_is_no_launch(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("""
import sys, time
from pathlib import Path
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.core.base.errors import UserError
try:
    with setup(device="cpu", run_dir=Path("r")):
        Path("up").touch()
        while not Path("end").exists():
            time.sleep(0.05)
except UserError as error:
    print(error)
    sys.exit(2)
""")
    words = [sys.executable, "rank.py"]
    first = subprocess.Popen(words, cwd=tmp_path, env=clean_env())
    _wait_for(tmp_path / "up")
    ranks = {**clean_env(OMP_NUM_THREADS="1"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1", str(tmp_path)))}
    others = [subprocess.Popen(words, cwd=tmp_path, env={**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                               text=True, stdout=subprocess.PIPE) for rank in range(2)]
    launched = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    name = f"in use: rank 0, pid {first.pid} on "
    for rank in others:
        stderr, _ = rank.communicate(timeout=scaled(120))
        assert (rank.returncode, name in stderr) == (2, True), stderr
    (tmp_path / "end").touch()
    assert first.wait(timeout=scaled(60)) == 0
    assert (launched.returncode, name in launched.stderr) == (2, True), launched.stderr
    assert launch(tmp_path, "-n", "1", "--run-dir", "r", "true").returncode == 0


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_many_becomes_the_owner(tmp_path: Path, stale: bool) -> None:
    run_dir = RunDir(tmp_path / "r").create()
    if stale:
        _owned_by(run_dir.path, replace(_ELSEWHERE, place=pid_namespace_id(), pid=os.getpid(), begun=1))
    begin, owned, refused = threading.Barrier(8), [], []

    def try_it() -> None:
        begin.wait()
        try:
            owned.append(become_owner(run_dir, "x", {}))
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(owned), len(refused)) == (1, 7)
    owned[0].release()
    with become_owner(run_dir, "y", {}):
        pass
    assert not (run_dir.control / "owner.json").exists()


def test_an_owner_on_another_host_is_watched(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(owner, "HEARTBEAT_INTERVAL_S", 0.3)
    file = _owned_by(tmp_path / "r", replace(_ELSEWHERE, host="n9;id\x1b[2J"))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="in use: launch, pid 1 on n9;id") as raised:
        become_owner(RunDir(tmp_path / "r"), "x", {})
    assert r"ssh 'n9;id\x1b[2J' kill 1" in str(raised.value)
    ended.set()
    thread.join()
    os.utime(file, (time.time() + 3600,) * 2)
    with become_owner(RunDir(tmp_path / "r"), "x", {}) as owned:
        assert owned.killed_run_id == ""
    taken_over = f"taking over the run directory {tmp_path}/r from launch, pid 1 on n9;id\\x1b[2J"
    assert taken_over in capfd.readouterr().err


def test_an_owner_that_ends_during_the_wait_is_not_taken_over(tmp_path: Path, capfd) -> None:
    file = _owned_by(tmp_path / "r", _ELSEWHERE)
    remove = threading.Timer(0.5, file.unlink)
    remove.start()
    become_owner(RunDir(tmp_path / "r"), "x", {}).release()
    remove.join()
    assert "taking over" not in capfd.readouterr().err


@pytest.mark.parametrize(("age_s", "env", "reason"), [
    (0, {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}, "its job has been requeued"),
    (3600, {"SLURM_JOB_ID": "42"}, "no heartbeat for 120 s"),
])
def test_a_requeued_or_later_job_does_not_wait(tmp_path: Path, age_s: float, env: dict, reason: str, capfd,
                                               monkeypatch) -> None:
    file = _owned_by(tmp_path / "r", replace(_ELSEWHERE, job="41"))
    os.utime(file, (time.time() - age_s,) * 2)
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: pytest.fail("it waits"))
    become_owner(RunDir(tmp_path / "r"), "x", env).release()
    stderr = capfd.readouterr().err
    assert "from launch, pid 1 on n9, job 41, since " in stderr
    assert reason in stderr


def test_an_owner_is_alive_as_long_as_it_touches_its_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_INTERVAL_S", 0.05)
    run_dir = RunDir(tmp_path / "r").create()
    with become_owner(run_dir, "x", {}):
        os.utime(run_dir.control / "owner.json", (0, 0))
        _wait_until(lambda: (run_dir.control / "owner.json").stat().st_mtime > 0)


_OWNER_OF_TWO = """
import sys
from pathlib import Path
from ezpz_llm.launcher.jobs import owner
from ezpz_llm.core.rundir import RunDir
owner.HEARTBEAT_INTERVAL_S = 0.02
with owner.become_owner(RunDir(Path("r")), "x", {}), owner.become_owner(RunDir(Path("other")), "x", {}):
    print("owned", flush=True)
    sys.stdin.read()
"""


def test_a_suspended_owner_does_not_keep_its_successors_lock_fresh(tmp_path: Path, monkeypatch) -> None:
    locks = [RunDir(tmp_path / name).create().control / "owner.json" for name in ("r", "other")]
    with subprocess.Popen([sys.executable, "-c", _OWNER_OF_TWO], cwd=tmp_path, env=clean_env(), text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "owned\n"
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        os.utime(locks[0], (0, 0))
        # The successor is on another node, and its own heartbeat never comes.
        monkeypatch.setattr(owner, "pid_namespace_id", lambda: "another boot")
        monkeypatch.setattr(owner, "HEARTBEAT_INTERVAL_S", 3600)
        with become_owner(RunDir(tmp_path / "r"), "y", {}):
            os.utime(locks[0], (0, 0))
            first.send_signal(signal.SIGCONT)
            for _ in range(10):
                os.utime(locks[1], (0, 0))
                _wait_until(lambda: locks[1].stat().st_mtime > 0)
            assert locks[0].stat().st_mtime == 0
            first.communicate(timeout=scaled(60))
            assert locks[0].exists()


def test_a_damaged_lock_is_named(tmp_path: Path) -> None:
    _owned_by(tmp_path / "r", _ELSEWHERE).write_text("{")
    with pytest.raises(UserError, match="the file of its owner is damaged") as raised:
        become_owner(RunDir(tmp_path / "r"), "x", {})
    assert raised.value.where == str(tmp_path / "r/control/owner.json")


@pytest.mark.full
@pytest.mark.cluster
def test_on_other_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """launch waits for a sign of life of an owner on another node; a requeued job takes over its own directory."""
    (tmp_path / "job.sh").write_text("""#!/bin/bash
#SBATCH --nodes=1 --nodelist=n1 --requeue --output=job.log --open-mode=append
if [[ ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
    launch -n 1 --run-dir r sh -c 'touch up; sleep 300' &
    until [[ -e killed ]]; do sleep 0.1; done
    kill -9 $!
    scontrol requeuehold $SLURM_JOB_ID
    sleep 60
fi
launch -n 1 --run-dir r hostname
""")
    sent = cluster.run("sbatch", "--parsable", "job.sh", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    _wait_for(tmp_path / "up")
    job = sent.stdout.strip()
    refused = cluster.run("launch", "-n", "1", "--run-dir", "r", "true", node="n2", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert f"on n1, job {job}, since" in refused.stderr
    (tmp_path / "killed").touch()
    deadline = time.monotonic() + scaled(90)
    for words in (("update", f"JobId={job}", "NodeList="), ("update", f"JobId={job}", "ExcNodeList=n1"),
                  ("release", job)):
        while cluster.run("scontrol", *words).returncode:
            assert time.monotonic() < deadline, "the job is not queued again"
            time.sleep(0.5)
    while "exit" not in (end := record(tmp_path / "r")) or end["exit"] is None:
        assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        time.sleep(0.2)
    log = (tmp_path / "job.log").read_text()
    assert f"job {job}, since" in log, log
    assert "its job has been requeued" in log, log
    assert end["exit"]["code"] == 0, log
    assert end["launch"]["hosts"] != ["n1"]


def test_the_next_launch_removes_half_written_checkpoints(tmp_path: Path) -> None:
    """Only the owner removes them, so that those of a running job are kept."""
    checkpoints = tmp_path / "r/checkpoints"
    for name in (".step-00000010.partial", ".step-00000005.removed", "step-00000005"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "rank-00000.safetensors").write_text("x")
    with owner.become_owner(RunDir(tmp_path / "r").create(), "another", {}):
        assert launch(tmp_path, "-n", "1", "--run-dir", "r", "true").returncode == 2
    assert len(list(checkpoints.iterdir())) == 3
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", "true")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000005"]
