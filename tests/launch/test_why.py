"""`ezpz-llm why` for runs that have ended, that are running, and whose launch was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record, start
from slowness import scaled

_HANGS = """
import os, sys, time
from pathlib import Path
from ezpz_llm.training.dist.heartbeat import answer_with_stacks
answer_with_stacks(os.environ)
rank, beats = int(os.environ["EZPZ_LLM_RANK"]), Path(os.environ["EZPZ_LLM_HEARTBEAT"])
def never_comes():
    time.sleep(300)
for step in range(1000):
    beats.write_text(f"training {min(step, 5)}\\n")
    if rank == 2 and step == 3:
        never_comes()
    time.sleep(0.2)
"""


def _why(cwd: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.why", *words], cwd=cwd, env=clean_env(),
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + scaled(60)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_run_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("""
import os, time
if os.environ["EZPZ_LLM_RANK"] == "1":
    raise ValueError("bad")
time.sleep(60)
""")
    ended = launch(tmp_path, "-n", "2", sys.executable, "fails.py")
    assert ended.returncode == 1
    post_mortem = ended.stderr[ended.stderr.index("launch: rank 1 on"):]
    [run_dir] = (tmp_path / "runs").iterdir()
    assert (run_dir / "postmortem.txt").read_text() == post_mortem
    # The newest run, from its files only.
    (run_dir / "postmortem.txt").unlink()
    text = _why(tmp_path)
    assert text.splitlines()[0].startswith(f"{run_dir}: ended ")
    assert text.splitlines()[0].endswith("with code 1")
    assert text.partition("\n")[2] == post_mortem
    answer = json.loads(_why(tmp_path, str(run_dir), "--json"))
    assert (answer["state"], answer["code"], answer["kind"], answer["rank"]) == ("ended", 1, "exception", 1)
    assert answer["record"]["exception"]["message"] == "bad"
    assert answer.keys() == {"state", "code", "cause", "kind", "rank", "text", "evidence", "failure_text", "hosts",
                           "only", "ranks", "waiting", "collectives", "record", "followers", "absent", "said",
                           "try", "resume"}
    well = launch(tmp_path, "--run-dir", "well", "-n", "2", "hostname")
    assert well.returncode == 0
    assert _why(tmp_path, "well").splitlines()[1] == "all ranks succeeded"


@pytest.mark.full
def test_a_hang_and_a_killed_launch(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(_HANGS)
    run = start(tmp_path, "-n", "4", "--run-dir", "r", sys.executable, "hangs.py")
    _wait_for(lambda: (tmp_path / "r/heartbeat/node0000.json").exists()
              and "ranks 0-1,3: training, step 5" in _why(tmp_path, "r"), "all ranks at step 5")
    _wait_for(lambda: "silent: rank 2 on" in _why(tmp_path, "r", "--silent-after", "2"), "silence of rank 2")
    text = _why(tmp_path, "r", "--silent-after", "2")
    assert "rank 2: training, step 3" in text
    assert f"silent: rank 2 on {os.uname().nodename}: training, step 3" in text
    assert re.search(r"in never_comes|never_comes \(", text)  # by faulthandler or py-spy
    assert (tmp_path / "r/stacks/rank0002.txt").exists()
    answer = json.loads(_why(tmp_path, "r", "--silent-after", "2", "--json"))
    assert (answer["state"], answer["silent"]) == ("running", [2])
    assert answer["ranks"]["2"]["step"] == 3
    assert list(answer["stacks"]) == ["2"]
    assert "rank 0: " in _why(tmp_path, "r", "--stacks", "0")
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=scaled(120))
    _wait_for(lambda: left_over(tmp_path / "r") == {}, "the end of all processes")
    assert record(tmp_path / "r")["exit"] is None
    assert not (tmp_path / "r/postmortem.txt").exists()
    text = _why(tmp_path, "r")
    assert "launch was killed before it could record the exit" in text
    assert "launch itself was killed" in text
    answer = json.loads(_why(tmp_path, "r", "--json"))
    assert (answer["state"], answer["kind"], answer["code"]) == ("launch was killed", "launcher", 137)


def test_a_run_whose_ranks_have_ended_and_whose_launch_has_yet_to_say_so(tmp_path: Path) -> None:
    program = "touch runs; while [ ! -e end ]; do sleep 0.05; done"
    run = start(tmp_path, "-n", "1", "--run-dir", "r", "sh", "-c", program)
    try:
        _wait_for((tmp_path / "runs").exists, "the rank")
        run.send_signal(signal.SIGSTOP)
        (tmp_path / "end").touch()
        _wait_for(lambda: left_over(tmp_path / "r") == {}, "the end of the rank")
        assert json.loads(_why(tmp_path, "r", "--json"))["state"] == "running"
    finally:
        run.send_signal(signal.SIGCONT)
        run.communicate(timeout=scaled(60))
    assert _why(tmp_path, "r").splitlines()[1] == "all ranks succeeded"


def test_what_is_no_run(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "ezpz_llm.why", *words], cwd=tmp_path, env=clean_env(),
                              capture_output=True, text=True, timeout=scaled(60), check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "no run in runs/" in refused()
    assert "the run directory does not exist: it was removed, or never created" in refused("runs/a")
    (tmp_path / "runs/a").mkdir(parents=True)
    assert "no run in runs/" in refused()
    assert "run.json has no launch record" in refused("runs/a")
    (tmp_path / "runs/a/run.json").write_text("{")
    assert re.search(r"this is not JSON.*\n.*run\.json", refused())
    for text, found in (("[]", "is not a run record"),
                        ('{"launch": {"argv": []}}', "run.json has no launch record"),
                        ('{"launch": {"argv": 3}}', "launch.argv is 3, but must be a list"),
                        ('{"launch": "yes"}', "launch is 'yes', but must be an object")):
        (tmp_path / "runs/a/run.json").write_text(text)
        assert found in refused("runs/a")
    (tmp_path / "runs/a/run.json").unlink()
    (tmp_path / "runs/a/run.json").mkdir()
    assert re.search(r"this is a folder, not a regular file\n.*run\.json", refused("runs/a"))
    assert "'x' is not a list of ranks" in refused("--stacks", "x")


def test_a_directory_that_was_removed_during_the_run(tmp_path: Path) -> None:
    """launch writes the end into a new directory; `why` and `report` show what it contains."""
    program = "import os, shutil; shutil.rmtree(os.environ['EZPZ_LLM_RUN_DIR']); raise SystemExit(7)"
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "r").mkdir(exist_ok=True)
    (tmp_path / "r/run.json").write_text(json.dumps({"exit": {"code": 7, "cause": "rank 0 failed", "rank": 0}}))
    assert "r: ended with code 7: rank 0 failed. The command is unknown" in _why(tmp_path, "r")
    shown = json.loads(_why(tmp_path, "r", "--json"))
    assert (shown["state"], shown["code"], shown["cause"], shown["rank"]) == ("ended", 7, "rank 0 failed", 0)
    for room, found in (("report", "run directory does not exist"), ("explain", "run directory does not exist")):
        done = subprocess.run([sys.executable, "-m", f"ezpz_llm.{room}", "gone"], cwd=tmp_path, env=clean_env(),
                              capture_output=True, text=True, timeout=scaled(60), check=False)
        assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
        assert found in done.stderr


def test_torch_is_not_imported() -> None:
    code = "import sys, ezpz_llm.why; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60), check=False).returncode == 0


# Like torch: the lock, then ninja in the extension's folder.
_COMPILES = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "some_op")
folder.mkdir(parents=True, exist_ok=True)
try:
    (folder / "lock").open("x").close()
except FileExistsError:
    time.sleep(300)
subprocess.run([sys.argv[1]], cwd=folder)
"""


@pytest.mark.full
def test_locks_of_builds(tmp_path: Path) -> None:
    """A lock left by a rank of this run is removed with the rank.

    For an older lock, `why` and the post-mortem print the command to remove it.
    """
    (tmp_path / "compiles.py").write_text(_COMPILES)
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\nsleep 300 & wait\n")
    ninja.chmod(0o755)
    env = {"EZPZ_LLM_CACHE": str(tmp_path / "cache")}
    running = start(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "compiles.py", str(ninja), **env)

    def locks() -> list[Path]:
        return [*(tmp_path / "cache/torch_extensions").glob("*/some_op/lock")]

    _wait_for(locks, "no rank has begun to compile")
    _wait_for(lambda: "has been compiling for 0 min (process" in _why(tmp_path, "r"), "the build is not seen")
    [lock] = locks()
    assert any("compile some_op on its first use" in line for line in running.stderr)
    running.terminate()
    running.communicate(timeout=scaled(60))
    assert locks() == []
    lock.touch()
    waits = start(tmp_path, "-n", "2", "--run-dir", "w", sys.executable, "compiles.py", str(ninja), **env)
    _wait_for((tmp_path / "w/heartbeat/node0000.json").exists, "the run has not started")
    words = ("some_op: the build lock is 0 min old, and no process on this node is compiling it; if no"
             f" process on another node is either, remove the lock: rm {lock}")
    assert words in _why(tmp_path, "w")
    record = tmp_path / "w/run.json"
    record.chmod(0o666)  # by now, another user may have created that folder
    assert "rm " not in _why(tmp_path, "w")
    record.chmod(0o600)
    waits.terminate()
    assert words in waits.communicate(timeout=scaled(60))[1]
    assert words in _why(tmp_path, "w")
    record.chmod(0o666)
    assert "rm " not in _why(tmp_path, "w")
    assert lock.exists()
