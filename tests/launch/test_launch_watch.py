"""Silent and waiting ranks, agents of nodes, real hangs, real stacks, forwarded signals."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record, start
from slowness import scaled

from ezpz_llm.core.base.private_folders import make_private, new_secret, remove_private
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics import node_folder as folder
from ezpz_llm.launcher.basics.messages import (
    ENDED,
    NodeReport,
    RankReport,
    control_interval_s,
    interval_s,
    read_reports,
    write_report,
)
from ezpz_llm.launcher.basics.node_folder import folder_prefix, parent_dir, remove_stale
from ezpz_llm.launcher.basics.processes import pid_namespace_id
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.basics.variables import COMPILING, EVALUATING, RENDEZVOUS, SAVING, TRAINING
from ezpz_llm.launcher.diagnosis.liveness import HeartbeatMonitor, RankLife, find_silent_ranks


def _life(rank: int, silent_s: float | None, idle_s: float = 0.0, phase: str | None = TRAINING,
          step: int | None = 5, node_s: float = 0.0) -> RankLife:
    return RankLife(rank, f"n{rank}", phase, step, silent_s, idle_s, node_s, node_limit_s=30.0)


@pytest.mark.parametrize(("ranks", "silent"), [
    # With heartbeats, each rank is judged by itself, whatever another prints.
    ([_life(0, 1), _life(1, 20, idle_s=20)], [1]),
    ([_life(0, 1), _life(1, 20, idle_s=0)], [1]),
    ([_life(0, 1), _life(1, 9)], []),
    # The rank furthest behind is the first suspect, after a rank whose node is lost.
    ([_life(0, 20, step=6), _life(1, 20, step=5), _life(2, 20, step=6)], [1, 0, 2]),
    ([_life(0, 20, step=6), _life(1, 20, step=5), _life(2, 40, step=6, node_s=40)], [2, 1, 0]),
    # A rank that compiles, saves or evaluates is active while it uses the processor, and others may wait for it.
    ([_life(0, 20, phase=SAVING), _life(1, 20)], []),
    ([_life(0, 20, phase=COMPILING, step=0), _life(1, 20, step=0)], []),
    ([_life(0, 20, idle_s=20, phase=EVALUATING), _life(1, 20, idle_s=20, phase=EVALUATING)], [0, 1]),
    # It does not excuse a rank that is behind it.
    ([_life(0, 20, phase=SAVING, step=6), _life(1, 20, step=5)], [1]),
    # Without heartbeats, one active rank is enough.
    ([_life(0, None, idle_s=1), _life(1, None, idle_s=99)], []),
    ([_life(0, None, idle_s=20), _life(1, None, idle_s=99)], [0, 1]),
    # Ranks in the rendezvous wait for one that is still importing.
    ([_life(0, 20, phase=RENDEZVOUS, step=None), _life(1, None, idle_s=0, phase=None, step=None)], []),
    ([], []),
])
def test_silent_ranks(ranks: list[RankLife], silent: list[int]) -> None:
    suspects = [rank.rank for rank in find_silent_ranks(ranks, limit_s=10.0)]
    assert sorted(suspects) == sorted(silent)
    assert suspects[:1] == silent[:1]


@pytest.mark.full
def test_a_stopped_rank_is_the_first_suspect(tmp_path: Path) -> None:
    """Among ranks without heartbeats, all equally silent, the kernel's state identifies one that got SIGSTOP."""
    (tmp_path / "stops.py").write_text("""
import os, signal, time
if os.environ["EZPZ_LLM_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
""")
    done = launch(tmp_path, "-n", "3", "--idle-timeout", "3", "--run-dir", "r", sys.executable, "stops.py")
    assert done.returncode == 124
    cause = record(tmp_path / "r")["exit"]["cause"]
    assert re.match(r"no sign of life for 3 s: rank 1 on \S+: .*; stopped by a signal \(state T; .*\),"
                    r" unlike ranks 0,2; launch ended the run", cause)


@pytest.mark.full
def test_a_stopped_rank_is_noted_without_an_idle_limit(tmp_path: Path) -> None:
    """The note is printed once, while the others wait for the stopped rank."""
    (tmp_path / "soon.py").write_text("""
import sys
from ezpz_llm.launcher.running import run_monitor
from ezpz_llm.launcher.running.command import main
run_monitor._NOTE_AFTER_S, run_monitor._REPORT_POLL_S = 1.0, 0.5
sys.exit(main(sys.argv[1:]))
""")
    (tmp_path / "stops.py").write_text("""
import os, signal, time
if os.environ["EZPZ_LLM_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(8)
if os.environ["EZPZ_LLM_RANK"] == "0":
    raise SystemExit(3)
""")
    done = subprocess.run([sys.executable, "soon.py", "-n", "2", "--run-dir", "r", sys.executable, "stops.py"],
                          cwd=tmp_path, env=clean_env(), capture_output=True, text=True,
                          timeout=scaled(100), check=False)
    assert done.returncode == 3
    assert len(re.findall(r"rank 1 on \S+: .*; stopped by a signal \(state T; kill -CONT continues it\)",
                          done.stderr)) == 1, done.stderr


def _report(run_dir: RunDir, rank: int, silent_s: float, state: str = "running") -> None:
    one = RankReport(pid=7, phase=TRAINING, step=3, silent_s=silent_s, idle_s=silent_s)
    write_report(run_dir, NodeReport("id", f"n{rank}", rank, state, 1.0, {rank: one}))


def test_ages_rest_on_no_two_clocks(tmp_path: Path) -> None:
    """A node reports ages by its own clock, and launch adds the time since; file times and dates are not used."""
    run_dir = RunDir(tmp_path).create()
    life = HeartbeatMonitor(run_dir, "id", {0: "n0", 1: "n1"}, started=1000.0)
    _report(run_dir, 0, 2.0)
    os.utime(run_dir.node_report(0), (0, 0))
    life.look(1001.0)
    ages = {rank.rank: rank for rank in life.ranks(1004.0)}
    assert ages[0].silent_s == pytest.approx(5.0)
    assert ages[1].idle_s < 0  # it has not come yet, and has a minute for that
    for now in range(1005, 1065, 5):
        life.look(float(now))
    assert {rank.rank: rank for rank in life.ranks(1064.0)}[0].silent_s == pytest.approx(65.0)
    assert life.silent_nodes(1064.0, 60.0) == []  # no other node reports
    _report(run_dir, 1, 0.0)
    life.look(1064.5)
    assert [report.host for report, _ in life.silent_nodes(1065.0, 60.0)] == ["n0"]
    _report(run_dir, 0, 2.0, state=ENDED)
    life.look(1066.0)
    assert [rank.rank for rank in life.ranks(1066.0)] == [1]


def test_time_without_polling_does_not_count_as_silence(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).create()
    life = HeartbeatMonitor(run_dir, "id", {0: "n0"}, started=0.0)
    _report(run_dir, 0, 1.0)
    life.look(1.0)
    life.look(500.0)
    assert life.ranks(500.0)[0].silent_s < 15.0


def test_reports_of_another_run_and_half_written_ones_are_left_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).create()
    _report(run_dir, 0, 1.0)
    whole = run_dir.node_report(0).read_text()
    run_dir.node_report(4).write_text(whole[: len(whole) // 2])
    run_dir.node_report(8).write_text(whole.replace('"id"', '"other"'))
    assert [report.first_rank for report in read_reports(run_dir, "id")] == [0]


def test_a_file_system_survives_many_nodes() -> None:
    assert (interval_s(4), control_interval_s(4)) == (1.0, 1.0)
    assert 10624 / interval_s(10624) <= 200
    assert 10624 / control_interval_s(10624) <= 2000


# Rank 1 does not come to step 3, where rank 0 waits for it and goes on to print.
_HANG = """
import os, time
from ezpz_llm.training.dist.heartbeat import Heartbeat
from ezpz_llm.training.dist.heartbeat import answer_with_stacks
answer_with_stacks(os.environ)
heart, rank, folder = Heartbeat(os.environ), int(os.environ["EZPZ_LLM_RANK"]), os.environ["EZPZ_LLM_RUN_DIR"]
def wait_for_a_lock():
    while True:
        time.sleep(0.1)
for step in range(100000):
    heart.beat("training", step)
    if rank == 1 and step == 3:
        wait_for_a_lock()
    time.sleep(0.2)
    print("chatter", flush=True)
"""


def test_a_hang_ends_with_124_and_the_stack_of_the_silent_rank(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(_HANG)
    done = launch(tmp_path, "-n", "2", "--idle-timeout", "3", "--run-dir", "r", sys.executable, "hang.py")
    assert done.returncode == 124, done.stderr
    # The same phase is written once a second, so the step may be an earlier one.
    assert re.search(r"rank 1 on \S+: training, step [0-3], silent for \d+ s; its stack: \S+/r/stacks/rank0001.txt",
                     done.stderr), done.stderr
    assert "for comparison, rank 0" in done.stderr
    [stack] = (tmp_path / "r/stacks").glob("rank0001*")
    assert "wait_for_a_lock" in stack.read_text()
    assert "hang.py" in stack.read_text()
    assert record(tmp_path / "r")["exit"]["kind"] == "idle"
    assert left_over(tmp_path / "r") == {}
    run_id = record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"]
    assert run_id not in [named for _, named, _ in folder.own_folders()]


# Waits like torch.utils.cpp_extension.load, without the seconds for `import torch`.
_LOCKED = """
import importlib.util, os, signal, sys, time
from pathlib import Path
rank, run = os.environ["EZPZ_LLM_RANK"], Path(os.environ["EZPZ_LLM_RUN_DIR"])
if rank == "2":
    signal.signal(signal.SIGTERM, lambda *_: (run / "saved").touch() or sys.exit(0))
    time.sleep(60)
place = Path(importlib.util.find_spec("torch").submodule_search_locations[0], "utils/file_baton.py")
spec = importlib.util.spec_from_file_location("file_baton", place)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
Path("ops/frob").mkdir(parents=True, exist_ok=True)
Path("ops/frob/lock").touch()
print(f"Using {Path('ops').absolute()} as PyTorch extensions root...", flush=True)
module.FileBaton("ops/frob/lock").wait()
"""


@pytest.mark.full
def test_ranks_without_py_spy_say_where_they_stand_as_they_are_ended(tmp_path: Path) -> None:
    """A lock left by a killed build is named, although the program prints nothing and ignores signals.

    A rank that saves on a signal can still do so, and no rank leaves a core file.
    """
    (tmp_path / "locked.py").write_text(_LOCKED)
    words = f"ulimit -c unlimited; exec {sys.executable} locked.py"
    done = launch(tmp_path, "-n", "3", "--idle-timeout", "3", "--run-dir", "r", "bash", "-c", words)
    assert done.returncode == 124, done.stderr
    text = (tmp_path / "r/postmortem.txt").read_text()
    assert re.match(r"launch: ranks 0-1: waiting for the lock of a torch extension build, .*: no sign of life for 3"
                    r" s: .*; launch ended the run; ranks 0-1 are at file_baton\.py:\d+ in wait"
                    r" \(called from locked\.py:\d+ in <module>\)\n", text), text
    assert "\n  try: if no rank is compiling (no ninja process on any node), remove the file `lock` from " in text
    assert f"remove the lock: rm {tmp_path}/ops/frob/lock" in text
    assert (tmp_path / "r/saved").exists()
    assert not list(tmp_path.glob("core*"))
    assert record(tmp_path / "r")["exit"]["kind"] == "idle"
    assert left_over(tmp_path / "r") == {}


_RANK_0_ENDS = """
import os, sys, time
from ezpz_llm.training.dist.heartbeat import Heartbeat
Heartbeat(os.environ).beat("training", 7)
if os.environ["EZPZ_LLM_RANK"] == "1":
    time.sleep(60)
"""


@pytest.mark.full
def test_the_agent_outlives_local_rank_0(tmp_path: Path) -> None:
    """A rank that succeeded does not count as silent; the other ranks of its node are still monitored."""
    (tmp_path / "ends.py").write_text(_RANK_0_ENDS)
    done = launch(tmp_path, "-n", "2", "--idle-timeout", "3", "--run-dir", "r", sys.executable, "ends.py")
    assert done.returncode == 124, done.stderr
    assert "no sign of life for 3 s: rank 1 on " in done.stderr
    assert not re.search(r"rank 0 on \S+: ", done.stderr)
    assert re.search(r"launch: rank 0 on \S+ ended with code 0 after \S+ s while rank 1 was still", done.stderr)
    [report] = read_reports(RunDir(tmp_path / "r"), record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"])
    assert report.ranks[0].ended == 0
    assert (report.state, report.left) == (ENDED, ())
    assert left_over(tmp_path / "r") == {}


# A long save without heartbeats, with its work in a child process.
_SAVE = """
import os, subprocess, sys
from ezpz_llm.training.dist.heartbeat import Heartbeat
heart = Heartbeat(os.environ)
heart.beat("training", 1)
heart.beat("saving", 1)
subprocess.run([sys.executable, "-c", "import time; end = time.time() + 6\\nwhile time.time() < end: pass"])
"""


@pytest.mark.full
def test_a_long_save_is_no_hang(tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(_SAVE)
    done = launch(tmp_path, "-n", "1", "--idle-timeout", "3", "--run-dir", "r", sys.executable, "save.py")
    assert done.returncode == 0, done.stderr


_ASKED = """
import os, signal, sys, time
def asked(*_):
    print("asked", os.environ["EZPZ_LLM_RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, asked)
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "up" + os.environ["EZPZ_LLM_RANK"]), "w").close()
time.sleep(60)
"""


def test_user_signals_are_forwarded_to_all_ranks(tmp_path: Path) -> None:
    """Slurm's --signal=B:USR1@60 sends it to launch in a batch script."""
    (tmp_path / "asked.py").write_text(_ASKED)
    running = start(tmp_path, "-n", "2", "--tee", "all", "--run-dir", "r", sys.executable, "asked.py")
    deadline = time.monotonic() + scaled(30)
    while len(list((tmp_path / "r").glob("up*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGUSR1)
    out, err = running.communicate(timeout=scaled(120))
    assert running.returncode == 0, err
    assert sorted(re.findall(r"asked \d", out)) == ["asked 0", "asked 1"]


_LATE = """
import os, signal, sys, time
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "up" + os.environ["EZPZ_LLM_RANK"]), "w").close()
while not os.path.exists("sent"):  # as if it imported its modules
    time.sleep(0.02)
time.sleep(0.5)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
time.sleep(60)
"""


def test_user_signals_are_kept_until_the_program_handles_them(tmp_path: Path) -> None:
    """They would kill a program that still imports its modules, and the shell around it."""
    (tmp_path / "late.py").write_text(_LATE)
    running = start(tmp_path, "-n", "2", "--run-dir", "r", "bash", "-c", f"{sys.executable} late.py; exit $?")
    deadline = time.monotonic() + scaled(30)
    while len(list((tmp_path / "r").glob("up*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    (tmp_path / "sent").touch()
    _, err = running.communicate(timeout=scaled(120))
    assert running.returncode == 0, err


def test_folders_of_dead_runs_are_removed_and_others_kept() -> None:
    """Folders are removed at once if the run would be visible here, and later if not (in a container)."""
    own = f"test{os.getpid()}"
    # First, as in a run, since agents of other runs on this machine also sweep.
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "EZPZ_LLM_RUN_ID": f"{own}lived"})
    folders = {}
    try:
        for name, where in (("dead", pid_namespace_id()), ("lived", pid_namespace_id()), ("old", "elsewhere"),
                            ("young", "elsewhere"),
                            ("nameless", None)):
            folders[name] = parent_dir() / f"{folder_prefix()}{own}{name}"
            with make_private(folders[name]) as made:
                if where is not None:
                    made.write("run", f"{own}{name}\n{where}".encode())
        os.utime(folders["old"] / "run", (0, 0))
        for name in ("lived", "old", "nameless"):
            os.utime(folders[name], (0, 0))
        remove_stale("another")
        assert {name for name, path in folders.items() if path.exists()} == {"lived", "young"}
        remove_stale(f"{own}lived")
    finally:
        sleeper.kill()
        sleeper.wait()
        for path in folders.values():
            remove_private(path)


def test_a_rank_is_registered_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent can read at any moment, and an empty file made it fail."""
    seen, replace = [], os.replace
    run_id = f"test-{os.getpid()}-whole"

    def look_first(*names: str, **folders: int) -> None:
        seen.extend(folder.registered_ranks(one) for one, named, _ in folder.own_folders() if named == run_id)
        replace(*names, **folders)

    monkeypatch.setattr(os, "replace", look_first)
    env = {"EZPZ_LLM_RUN_ID": run_id, "EZPZ_LLM_SECRET": new_secret()}
    try:
        with folder.register_shim(RankInfo(0, 1, 0, 1, 0, "a test"), env) as entered:
            assert seen[-1] == {}
            assert folder.running_shims(entered) == {0: os.getpid()}
            assert stat.S_IMODE(entered.path.stat().st_mode) == 0o700
    finally:
        folder.remove(run_id)
    assert not entered.path.exists()


def test_ranks_of_a_node_share_an_unpredictable_folder() -> None:
    run_id, secret = f"test-{os.getpid()}-one", new_secret()
    env = {"EZPZ_LLM_RUN_ID": run_id, "EZPZ_LLM_SECRET": secret}
    entered = [folder.register_shim(RankInfo(rank, 2, rank, 2, 0, "a test"), env).path for rank in (0, 1)]
    other = folder.register_shim(RankInfo(0, 1, 0, 1, 0, "a test"), env | {"EZPZ_LLM_SECRET": new_secret()}).path
    folder.remove(run_id)
    assert entered[0] == entered[1] != other
    assert not any(word in str(entered[0]) for word in (run_id, secret, secret[:16]))
    assert not entered[0].exists()
    assert not other.exists()


@pytest.mark.parametrize("env", [{"EZPZ_LLM_RUN_ID": "x"}, {"EZPZ_LLM_RUN_ID": "x", "EZPZ_LLM_SECRET": "x"}])
def test_without_a_secret_there_is_no_folder(env: dict[str, str]) -> None:
    with pytest.raises(OSError, match="did not pass EZPZ_LLM_SECRET to the ranks"):
        folder.register_shim(RankInfo(0, 1, 0, 1, 0, "a test"), env)


def test_no_folder_is_made_where_others_could_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank gets its heartbeat file by path."""
    monkeypatch.setattr(folder, "parent_dir", lambda: tmp_path / "open")
    (tmp_path / "open").mkdir()
    env = {"EZPZ_LLM_RUN_ID": "x", "EZPZ_LLM_SECRET": new_secret()}
    for mode, is_safe in ((0o777, False), (0o775, False), (0o1777, True), (0o755, True)):
        (tmp_path / "open").chmod(mode)
        if is_safe:
            folder.register_shim(RankInfo(0, 1, 0, 1, 0, "a test"), env).close()
        else:
            with pytest.raises(OSError, match="other users can replace"):
                folder.register_shim(RankInfo(0, 1, 0, 1, 0, "a test"), env)
        assert bool(os.listdir(tmp_path / "open")) == is_safe
