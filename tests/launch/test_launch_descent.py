"""Children of the worst kind: in sessions of their own, orphaned, deaf to signals, and half of them without the
environment that would tell whose they are. None outlives its run, whoever of the run is killed.

`pytest -m slow tests/launch/test_launch_descent.py` has 400 of them a run, and real Slurm on two nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, need_mpiexec, record, start
from simcluster.cluster import Cluster
from slowness import scaled
from strangers import Strangers

from ezpz_llm.launch.node.folder import agents, remove

_FEW, _MANY = 12, 200

_PROGRAM = """
import os, signal, sys, time
rank, how, tag, count = int(os.environ["EZPZ_LLM_RANK"]), sys.argv[1], sys.argv[2], int(sys.argv[3])
for number in range(count):
    if os.fork() == 0:
        os.setsid()
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        if number % 3 == 0 and os.fork():
            os._exit(0)
        os.execve("/bin/sleep", [tag, "600"], {} if number % 2 else os.environ)
time.sleep(0.5)
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], f"up{rank}"), "w").close()
if how == "fail" and rank == 1:
    sys.exit(7)
if how == "sleep" or how == "fail":
    time.sleep(600)
"""


def _tagged(tag: str) -> set[int]:
    """The processes that call themselves so, on all simulated nodes too."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(tag.encode()):
                found.add(int(folder.name))
    return found


def _wait_for(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come within {timeout} s"
        time.sleep(0.1)


@pytest.fixture
def tag() -> Iterator[str]:
    """What a test's children call themselves; those that are left at its end are ended."""
    name = f"ezpz-test-{uuid.uuid4().hex[:12]}"
    yield name
    for pid in _tagged(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(_PROGRAM)
    return "program.py"


def _words(how: str, tag: str, count: int) -> tuple[str, ...]:
    return "-n", "2", "--run-dir", "r", sys.executable, "program.py", how, tag, str(count)


def _await_children(folder: Path, tag: str, count: int) -> None:
    _wait_for(lambda: all((folder / f"r/up{rank}").exists() for rank in (0, 1)), "both ranks")
    _wait_for(lambda: len(_tagged(tag)) == 2 * count, f"{2 * count} children")


def _shims(processes: Iterable[tuple[int, str]]) -> set[int]:
    """Those of (pid, command line) that are shims of ranks."""
    forked = {pid for pid, words in processes if words.split()[1:3] == ["-m", "ezpz_llm.launch.shim"]}
    # Each has a janitor, and an agent, for children.
    shims = {pid for pid in forked if _parent(pid) not in forked}
    assert len(shims) == 2
    return shims


def _kill(folder: Path, *kinds: str) -> None:
    """Kill processes of a run: its "shims", its "agent", its "launcher"; all that are not ranks."""
    of_run = left_over(folder / "r")
    shims = _shims(of_run.items())
    agent = set(agents(record(folder / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"]))
    assert agent
    launchers = {pid for pid, words in of_run.items() if "mpiexec" in words.split()[0] or "hydra" in words}
    for pid in set().union(*({"shims": shims, "agent": agent, "launcher": launchers}[kind] for kind in kinds)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


_COUNTS = [_FEW, pytest.param(_MANY, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("fail", 7)])
def test_a_run_that_ends(tmp_path: Path, program: str, tag: str, how: str, code: int, count: int) -> None:
    done = launch(tmp_path, *_words(how, tag, count))
    assert done.returncode == code, done.stderr
    assert _tagged(tag) == set()
    assert left_over(tmp_path / "r") == {}


@pytest.mark.full
@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("killed", [("shims",), ("launch",), ("launch", "launcher", "shims", "agent")],
                         ids=lambda killed: "+".join(killed))
def test_a_run_of_which_some_are_killed(tmp_path: Path, program: str, tag: str, killed: tuple[str, ...],
                                        count: int) -> None:
    """Nothing has the time to say goodbye."""
    run = start(tmp_path, *_words("sleep", tag, count))
    try:
        _await_children(tmp_path, tag, count)
        # Two looks of the agent.
        time.sleep(2.5)
        if "launch" in killed:
            run.kill()
        _kill(tmp_path, *(kind for kind in killed if kind != "launch"))
        run.communicate(timeout=scaled(40))
        assert run.returncode not in (0, None)
        _wait_for(lambda: not _tagged(tag), "the end of all children", 20)
        _wait_for(lambda: left_over(tmp_path / "r") == {}, "the end of all processes", 20)
    finally:
        run.kill()
        remove(record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"])


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("killed", ["nobody", "shims", pytest.param("launch", marks=pytest.mark.full)])
def test_on_two_nodes(host_cluster: Cluster, tmp_path: Path, program: str, tag: str, killed: str,
                      count: int) -> None:
    """Over ssh: no scheduler ends what is left."""
    need_mpiexec()
    run = host_cluster.start("launch", "--launcher", "mpiexec", "--hosts", "n1,n2", "--ppn", "1",
                             *_words("end" if killed == "nobody" else "sleep", tag, count), node="n1", cwd=tmp_path)
    try:
        if killed != "nobody":
            _await_children(tmp_path, tag, count)
            time.sleep(2.5)
            if killed == "launch":
                run.send_signal(signal.SIGKILL)
            else:
                found = host_cluster.processes(run.token).values()
                for pid in _shims(process for on_node in found for process in on_node):
                    os.kill(pid, signal.SIGKILL)
        _, err = run.communicate(timeout=scaled(60))
        assert (run.returncode == 0) == (killed == "nobody"), err
        assert "has not reported" not in err
        _wait_for(lambda: not _tagged(tag), "the end of all children", 20)
    finally:
        host_cluster.kill(run)


@pytest.mark.slow
def test_in_a_job_of_slurm(cluster: Cluster, tmp_path: Path, program: str, tag: str) -> None:
    """The reservation outlives the run: Slurm's own end of the job is not what clears the nodes."""
    (tmp_path / "job.sh").write_text(f"""#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t5
launch {' '.join(_words('end', tag, _MANY))} &> said.txt
echo $? > code.new && mv code.new code
read < go
""")
    os.mkfifo(tmp_path / "go")
    sent = cluster.run("sbatch", "--parsable", "job.sh", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    try:
        _wait_for((tmp_path / "code").exists, "the end of launch")
        assert (tmp_path / "code").read_text() == "0\n", (tmp_path / "said.txt").read_text()
        assert _tagged(tag) == set()
    finally:
        cluster.run("scancel", sent.stdout.strip())


_AT_THE_LAST_MOMENT = """
import os, signal, sys, time
from pathlib import Path
folder, tag = Path(os.environ["EZPZ_LLM_NODE_DIR"]), sys.argv[1]
group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
(Path(os.environ["EZPZ_LLM_RUN_DIR"]) / "group").write_text(group)
doomed = [os.getppid(), int((folder / "agent").read_text().split()[0])]
for pid in doomed:
    os.kill(pid, signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 1000)
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", [tag, "600"], {})
time.sleep(0.3)
for pid in doomed:
    os.kill(pid, signal.SIGKILL)
time.sleep(60)
"""
"""A child that nobody has seen, when shim and agent are killed."""


@pytest.mark.full
def test_nothing_leaves_a_delegated_control_group(strangers: Strangers, tag: str) -> None:
    """As a user's own systemd gives them."""
    hierarchy = next((path for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
                      if (path / "cgroup.controllers").exists()), None)
    if hierarchy is None or os.geteuid() != 0:
        pytest.skip("no control group can be delegated here")
    group, user = hierarchy / tag, strangers.victim
    group.mkdir()
    try:
        for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(group / name, user.uid, user.uid)
        enter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *user.enter)
        inside = replace(user, enter=enter)
        done = inside.launch("-n", "1", "--run-dir", "r", sys.executable, "-c", _AT_THE_LAST_MOMENT, tag)
        assert done.returncode not in (0, 1), done.stderr
        _wait_for(lambda: _tagged(tag) == set(), "the end of the child", 20)
        assert (user.home / "r/group").read_text().endswith("-rank0")
        done = inside.launch("-n", "2", "--run-dir", "s", "sh", "-c", "setsid sleep 600 & exit 0")
        assert done.returncode == 0, done.stderr
        _wait_for(lambda: [path for path in group.iterdir() if path.is_dir()] == [], "the end of all groups", 20)
    finally:
        user.end_all()
        for folder in (*group.glob("*/"), group):
            with contextlib.suppress(OSError):
                folder.rmdir()


def test_a_service_of_a_rank_that_has_ended_serves_the_others(tmp_path: Path, tag: str) -> None:
    """What a rank leaves running in a session of its own runs, and is heard, until the node's ranks have ended."""
    (tmp_path / "program.py").write_text(f"""
import os, pathlib, subprocess, sys, time
folder = os.environ["EZPZ_LLM_RUN_DIR"]
if os.environ["EZPZ_LLM_RANK"] == "1":
    service = "while [ ! -e $0/go ]; do sleep 0.1; done; echo served; touch $0/served; while :; do sleep 0.2; done"
    subprocess.Popen(["{tag}", "-c", service, folder], executable="/bin/sh", start_new_session=True,
                     env={{"PATH": os.environ["PATH"]}})
    sys.exit(0)
while not (pathlib.Path(os.environ["EZPZ_LLM_NODE_DIR"]) / "rank0001.ended").exists():
    time.sleep(0.05)
time.sleep(0.5)
open(folder + "/go", "w").close()
while not os.path.exists(folder + "/served"):
    time.sleep(0.05)
""")
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "program.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r/logs/rank0001.log").read_text() == "served\n"
    assert _tagged(tag) == set()


def test_reaping_others_keeps_the_ranks_own_code(tmp_path: Path) -> None:
    """Orphans that end before, and with, the rank are reaped; one after it does not hold it up; a janitor that is
    killed is one more child that ended."""
    (tmp_path / "program.py").write_text("""
import os, signal, sys, time
for code in range(20):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.01 * code)
            os._exit(code)
        os._exit(0)
time.sleep(0.1)
shim, own = os.getppid(), os.getpid()
agent = open(os.environ["EZPZ_LLM_NODE_DIR"] + "/agent").read().split()[0]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        parent = int(open(f"/proc/{pid}/stat", errors="replace").read().rpartition(")")[2].split()[1])
    except OSError:
        continue
    if parent == shim and pid != agent and int(pid) != own and "launch.shim" in open(f"/proc/{pid}/cmdline").read():
        os.kill(int(pid), signal.SIGKILL)
time.sleep(0.3)
states = [open(f"/proc/{pid}/stat", errors="replace").read().rpartition(")")[2].split()[:2]
          for pid in filter(str.isdigit, os.listdir("/proc")) if os.path.exists(f"/proc/{pid}/stat")]
assert ["Z", str(shim)] not in states, states
sys.exit(5)
""")
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", sys.executable, "program.py")
    assert done.returncode == 5, done.stderr
    assert record(tmp_path / "r")["exit"]["code"] == 5


def test_a_process_of_another_user_is_named(tmp_path: Path, tag: str) -> None:
    """As sudo starts them. Made by a rank of `nobody` that may become root, and then is not its own any more."""
    # The last one to read Python where root alone may look.
    able = "-all,+setuid,+setgid,+dac_read_search"
    drop = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--bounding-set={able}",
            f"--inh-caps={able}", f"--ambient-caps={able}")
    folder = Path("/tmp") / tag
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "program.py").write_text(f"""
import os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(3, 1000)
    os.setresuid(0, 0, 0)
    os.execve("/bin/sleep", ["{tag}", "600"], {{}})
time.sleep(2.5)
raise SystemExit(3)
""")

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*drop, sys.executable, *words], cwd=folder, env=clean_env(HOME=str(folder)),
                              capture_output=True, text=True, timeout=scaled(60), check=False)

    try:
        tried = as_nobody("-c", "import os, ezpz_llm.launch.__main__; os.setresuid(0, 0, 0)")
        if tried.returncode:
            pytest.skip(f"no run of another user can be made here: {tried.stderr[-200:]}")
        done = as_nobody("-m", "ezpz_llm.launch", "-n", "1", "--run-dir", "r", sys.executable, "program.py")
        assert done.returncode == 3, done.stderr
        [pid] = _tagged(tag)
        assert f"could not be killed, still running on {os.uname().nodename}: processes {pid}" in done.stderr
        assert (f"still running on {os.uname().nodename}: processes {pid}"
                in (folder / "r/postmortem.txt").read_text())
        assert "Traceback" not in done.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)
