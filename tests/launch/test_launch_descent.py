"""Cleanup of child processes that are hard to find: new sessions, orphaned, ignoring signals.

Half of them also lack the environment variables that mark the run. None may outlive its run, whichever process of
the run is killed. `pytest -m slow tests/launch/test_launch_descent.py` starts 400 of them per run, and uses real
Slurm on two nodes.
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

from ezpz_llm.launcher.basics.node_folder import agent_pids, remove

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
    """Return the processes with this tag, including those on simulated nodes."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(tag.encode()):
                found.add(int(folder.name))
    return found


def _wait_for(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.1)


@pytest.fixture
def tag() -> Iterator[str]:
    """Name of a test's child processes; remaining ones are killed at the end of the test."""
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
    """Return the process ids of the ranks' shims, from pairs of process id and command line."""
    forked = {pid for pid, words in processes if words.split()[1:3] == ["-m", "ezpz_llm.launcher.on_nodes.shim"]}
    # A shim's children include forked copies of it: a janitor, and the node's agent.
    shims = {pid for pid in forked if _parent(pid) not in forked}
    assert len(shims) == 2
    return shims


def _kill(folder: Path, *kinds: str) -> None:
    """Kill processes of a run by kind: "shims", "agent", "launcher"."""
    of_run = left_over(folder / "r")
    shims = _shims(of_run.items())
    agent = set(agent_pids(record(folder / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"]))
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
    """SIGKILL leaves the processes no time to clean up."""
    run = start(tmp_path, *_words("sleep", tag, count))
    try:
        _await_children(tmp_path, tag, count)
        # Two polling intervals of the agent.
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
    """Over ssh, no scheduler ends remaining processes."""
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
    """The reservation outlives the run, so that Slurm's own cleanup at the end of the job plays no part."""
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
"""Program that starts a child and at once kills shim and agent, which have not seen the child yet."""


@pytest.mark.full
def test_nothing_leaves_a_delegated_control_group(strangers: Strangers, tag: str) -> None:
    """Run in a control group delegated to the user, as by `systemd --user`."""
    hierarchy = next((path for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
                      if (path / "cgroup.controllers").exists()), None)
    if hierarchy is None or os.geteuid() != 0:
        pytest.skip("cannot delegate a control group")
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
    """A background process of an ended rank keeps running, with logged output, until the node's ranks end."""
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
    """The shim reaps orphans, does not wait for those that outlive the rank, and survives the janitor's death."""
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
    """Start a process as another user, as sudo does: a rank of `nobody` that can become root."""
    # dac_read_search is needed to read a Python below a folder that only root can read.
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
        attempt = as_nobody("-c", "import os, ezpz_llm.launcher.running.command; os.setresuid(0, 0, 0)")
        if attempt.returncode:
            pytest.skip(f"cannot run as another user: {attempt.stderr[-200:]}")
        done = as_nobody("-m", "ezpz_llm.launch", "-n", "1", "--run-dir", "r", sys.executable, "program.py")
        assert done.returncode == 3, done.stderr
        [pid] = _tagged(tag)
        assert f"could not be killed, still running on {os.uname().nodename}: processes {pid}" in done.stderr
        assert (f"still running on {os.uname().nodename}: processes {pid}"
                in (folder / "r/postmortem.txt").read_text())
        assert "Traceback" not in done.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)
