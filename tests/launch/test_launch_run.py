"""Real launches: exit codes, output through the shim, and cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record, start
from slowness import scaled

_RANK = """
import os, subprocess, sys, time
rank = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
"""

_SHIM = f"{sys.executable} -m ezpz_llm.launcher.on_nodes.shim"

# Each rank ignores SIGTERM, and starts one child in its process group and one in a new session.
_STUBBORN = _RANK + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "301"], start_new_session=True)
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], f"up{rank}"), "w").close()
time.sleep(300)
"""


def _script(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text)
    return name


def _wait_for(condition, what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.05)


def _log(run_dir: Path, rank: int) -> str:
    return (run_dir / "logs" / f"rank{rank:04d}.log").read_text()


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_the_first_failing_ranks_code(tmp_path: Path, launcher: str) -> None:
    program = _script(tmp_path, _RANK + """
subprocess.Popen(["sleep", "302"], start_new_session=True)
print("rank", rank, "is here", flush=True)
here = os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "here")
if rank == 0:
    open(here, "w").close()
if rank == 1:
    # torchrun ends the others at once, even one that has not got as far as to print.
    while not os.path.exists(here):
        time.sleep(0.01)
    print("bad news \\u2713", file=sys.stderr, flush=True)
    sys.exit(7)
time.sleep(100)
""")
    began = time.monotonic()
    done = launch(tmp_path, "--launcher", launcher, "-n", "3", "--run-dir", "r", sys.executable, program)
    assert done.returncode == 7, done.stderr
    assert time.monotonic() - began < scaled(20)
    assert "rank 1 on " in done.stderr
    assert "exit code 7" in done.stderr
    assert "| bad news ✓" in done.stderr
    assert "logs/rank0001.log" in done.stderr
    assert done.stdout == "rank 0 is here\n"
    failure = json.loads((tmp_path / "r/errors/rank0001.json").read_text())
    assert (failure["rank"], failure["exit_code"], failure["signal"]) == (1, 7, None)
    assert failure["tail"] == ["rank 1 is here", "bad news ✓"]
    assert failure["argv"] == [sys.executable, program]
    ended = record(tmp_path / "r")["exit"]
    assert ended["code"] == 7
    assert "rank 1" in ended["cause"]
    assert left_over(tmp_path / "r") == {}


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_killed_rank_is_128_and_its_signal(tmp_path: Path, launcher: str) -> None:
    program = _script(tmp_path, _RANK + "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(100)\n")
    done = launch(tmp_path, "--launcher", launcher, "-n", "2", "--run-dir", "r", sys.executable, program)
    assert done.returncode == 137, done.stderr
    assert "signal SIGKILL" in done.stderr
    assert json.loads((tmp_path / "r/errors/rank0001.json").read_text())["signal"] == "SIGKILL"
    assert left_over(tmp_path / "r") == {}


def test_all_ranks_well(tmp_path: Path) -> None:
    words = ("a b", "it's", '"q"', "$(date)", "x\\ny", "*", "", "-n", "--", "ü")
    program = _script(tmp_path, """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.rank, world.size, world.allreduce(world.rank + 1), sys.argv[1:], flush=True)
print("to stderr", file=sys.stderr)
""")
    done = launch(tmp_path, "-n", "3", "--run-dir", "r", "--explain", sys.executable, program, *words)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert _log(tmp_path / "r", rank).splitlines() == [f"{rank} 3 6 {list(words)!r}", "to stderr"]
    assert done.stdout == f"0 3 6 {list(words)!r}\n"
    assert "EZPZ_LLM_WORLD_SIZE=3" in done.stderr
    run = record(tmp_path / "r")
    assert run["exit"]["code"] == 0
    assert run["launch"]["command"][-len(words):] == list(words)
    assert (run["launch"]["world_size"], run["launch"]["launcher"]) == (3, "mpiexec")
    # Reusing the directory appends to the logs, and an old failure is not reported again.
    (tmp_path / "r/errors/rank0000.json").write_text("{}")
    again = launch(tmp_path, "-n", "1", "--run-dir", "r", "hostname")
    assert again.returncode == 0, again.stderr
    assert _log(tmp_path / "r", 0).splitlines()[-1] == again.stdout.strip()


def test_any_program_from_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    done = launch(tmp_path, "--hostfile", "hosts", "sh", "-c", "cat; hostname")
    assert done.returncode == 0, done.stderr
    assert "launch     2 ranks on 1 node (localhost), started by mpiexec" in done.stderr
    [run_dir] = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("sh-")
    assert _log(run_dir, 0) == _log(run_dir, 1) == done.stdout
    assert done.stdout.strip()
    too_many = launch(tmp_path, "--hostfile", "hosts", "-n", "3", "hostname")
    assert (too_many.returncode, "the nodes have 2 slots" in too_many.stderr) == (2, True)


def test_a_missing_command(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "no-such-program", "x")
    assert done.returncode == 127
    assert "cannot run 'no-such-program'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_whose_interpreter_is_missing(tmp_path: Path) -> None:
    """Linux reports "No such file or directory" for it."""
    (tmp_path / "run.sh").write_text("#!/bin/bash\r\necho ready\r\n")
    (tmp_path / "run.sh").chmod(0o755)
    done = launch(tmp_path, "-n", "1", "./run.sh")
    assert done.returncode == 127
    assert (r"cannot run './run.sh': its first line, '#!/bin/bash\r', names an interpreter that does not exist"
            in done.stderr)
    assert "dos2unix" in done.stderr


@pytest.mark.parametrize(("word", "found", "instead"), [
    ("train.py", "'train.py' is a Python script, not a program", "launch [options] python3 train.py …"),
    ("./train.py", "'./train.py' is a Python script, not a program", "launch [options] python3 ./train.py …"),
    ("trian.py", "'trian.py' is neither a program nor a file",
     "launch [options] python3 SCRIPT, with the path of an existing script"),
    ("ezpz_llm.train", "'ezpz_llm.train' is a Python module", "launch [options] python3 -m ezpz_llm.train …")])
def test_a_script_without_python_is_answered_before_the_start(word, found, instead, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = launch(tmp_path, "-n", "2", word, "--x")
    assert (done.returncode, done.stdout) == (2, "")
    assert found in done.stderr
    assert f"instead: {instead}\n" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_script_that_can_be_executed_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "train.py").chmod(0o755)
    done = launch(tmp_path, "-n", "1", "./train.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_launchers_own_failure_is_seen(tmp_path: Path) -> None:
    """On MPI_Abort, MPICH kills every process at once, shims included; code and last lines are still reported."""
    program = _script(tmp_path, """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    print("about to abort", flush=True)
    MPI.COMM_WORLD.Abort(5)
MPI.COMM_WORLD.barrier()
""")
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, program)
    assert done.returncode == 5, done.stderr
    assert "about to abort" in done.stderr
    assert left_over(tmp_path / "r") == {}


def test_idle_runs_are_ended(tmp_path: Path) -> None:
    """Run three cases at once: silent ranks, ranks that stop computing, and a rank whose heartbeat stops first."""
    quiet = start(tmp_path, "-n", "2", "--idle-timeout", "2", "--run-dir", "quiet", "sleep", "300")
    _script(tmp_path, "import time\nend = time.time() + 4\nwhile time.time() < end: pass\ntime.sleep(300)\n",
            "busy.py")
    busy = start(tmp_path, "-n", "1", "--idle-timeout", "2", "--run-dir", "busy", sys.executable, "busy.py")
    _script(tmp_path, _RANK + """
from pathlib import Path
from ezpz_llm.training.dist.heartbeat import Heartbeat
heart = Heartbeat(os.environ)
for step in range(2 if rank else 4):
    heart.beat("backward", step)
    time.sleep(1.1)
while True:
    print("chatter", flush=True)
    time.sleep(0.2)
""", "beats.py")
    beats = start(tmp_path, "-n", "2", "--idle-timeout", "3", "--run-dir", "beats", sys.executable, "beats.py")
    began = time.monotonic()
    said = {name: (run.communicate(timeout=scaled(60))[1], run.returncode) for name, run in
            (("quiet", quiet), ("busy", busy), ("beats", beats))}
    assert {name: code for name, (_, code) in said.items()} == {"quiet": 124, "busy": 124, "beats": 124}, said
    assert "no sign of life for 2 s" in said["quiet"][0]
    assert re.search(r"rank 1 on \S+: backward, step 1, silent for \d+ s", said["beats"][0])
    assert time.monotonic() - began > 5
    for name in said:
        assert record(tmp_path / name)["exit"]["code"] == 124
        assert left_over(tmp_path / name) == {}


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_launch_is_signaled_or_killed(tmp_path: Path, launcher: str) -> None:
    """Send SIGTERM, SIGINT and SIGKILL to three launches whose ranks ignore SIGTERM and have children."""
    program = _script(tmp_path, _STUBBORN)
    cases = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -signal.SIGKILL}
    runs = {name: start(tmp_path, "--launcher", launcher, "-n", "2", "--run-dir", name, sys.executable, program)
            for name in cases}
    for name, run in runs.items():
        _wait_for(lambda name=name: all((tmp_path / name / f"up{rank}").exists() for rank in (0, 1)), f"{name} up")
        assert len([words for words in left_over(tmp_path / name).values() if words.startswith("sleep")]) == 4
        run.send_signal(signal.Signals[name])
    for name, run in runs.items():
        _, err = run.communicate(timeout=scaled(40))
        assert run.returncode == cases[name], err
        _wait_for(lambda name=name: left_over(tmp_path / name) == {}, f"the end of all processes after {name}", 10)
    assert record(tmp_path / "SIGTERM")["exit"]["cause"].startswith("launch received SIGTERM (")


def test_a_killed_shim_leaves_nothing(tmp_path: Path) -> None:
    program = _script(tmp_path, _STUBBORN)
    run = start(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, program)
    _wait_for(lambda: (tmp_path / "r/up0").exists() and (tmp_path / "r/up1").exists(), "both ranks up")
    of_shims = [pid for pid, words in left_over(tmp_path / "r").items() if words.startswith(_SHIM)]
    # Each shim has a janitor, and the first one the node's agent, which are forked copies of the shim.
    shims = [pid for pid in of_shims if _parent(pid) not in of_shims]
    assert (len(shims), len(of_shims)) == (2, 5)
    os.kill(shims[0], signal.SIGKILL)
    with suppress(ProcessLookupError):  # the launcher may have ended it by now, since the first is gone
        os.kill(shims[1], signal.SIGKILL)
    _, err = run.communicate(timeout=scaled(120))
    assert run.returncode != 0, err
    _wait_for(lambda: left_over(tmp_path / "r") == {}, "the end of all processes", 10)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_checked_before_anything_starts(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "ezpz_llm.launch_check_probe", "--x")
    missing = launch(tmp_path, "-n", "2", *words)
    assert missing.returncode == 1
    assert "No module named ezpz_llm.launch_check_probe" in missing.stderr
    assert "nothing was started" in missing.stderr
    refused = launch(tmp_path, "-n", "2", sys.executable, "-m", "ezpz_llm.train", "--no-such-option", "3")
    assert refused.returncode == 2
    assert "no-such-option" in refused.stderr
    assert "Traceback" not in refused.stderr
    two = launch(tmp_path, "--run-dir", "a", sys.executable, "-m", "ezpz_llm.train", "--run-dir", "b")
    assert (two.returncode, "two run directories" in two.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_inside_ranks_launch_only_executes(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "hostname", timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("already rank 0 of 2") == 1
    [run_dir] = (tmp_path / "runs").iterdir()
    assert _log(run_dir, 1).splitlines() == done.stdout.splitlines()
    torchrun = subprocess.run(["torchrun", "--nproc-per-node", "2", "--no-python", "--", sys.executable, "-m",
                               "ezpz_llm.launch", "sh", "-c", "exit 0"], cwd=tmp_path, env=clean_env(),
                              capture_output=True, text=True, timeout=scaled(60), check=False)
    assert torchrun.returncode == 0, torchrun.stderr
    assert torchrun.stderr.count("launch: already rank 0 of 2 (torchrun") == 1
