"""Ranks that start late or never, and nodes that fail to start ranks: messages, and the end of the run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from launch_runs import launch, left_over, record
from simcluster.cluster import Cluster
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics import log_kinds as said
from ezpz_llm.launcher.basics.messages import NodeReport, RankReport, write_report
from ezpz_llm.launcher.diagnosis.liveness import HeartbeatMonitor, StartMonitor
from ezpz_llm.launcher.diagnosis.log_patterns import read_messages
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
_FACTS = RunFacts(4, tuple(_HOSTS.values()), "mpiexec", None, float("inf"), scheduler="slurm")
_EXECVE = "slurmstepd-n2: error: execve(): /x/python: No such file or directory\n"
_TASK = "srun: error: n2: task {}: Exited with exit code 2\n"

# Imported by every Python at start: delays the shim of one rank, or of one node, by SECONDS.
_LATE = """
import os, sys, time
if "ezpz_llm.launcher.on_nodes.shim" in sys.orig_argv and {who}:
    time.sleep({seconds})
"""


def _late(folder: Path, who: str, seconds: float) -> dict[str, str]:
    (folder / "late").mkdir()
    (folder / "late/sitecustomize.py").write_text(_LATE.format(who=who, seconds=seconds))
    return {"PYTHONPATH": str(folder / "late")}


def _arrivals(folder: Path, limit_s: float | None = 10.0, words: str = "") -> StartMonitor:
    run_dir = RunDir(folder).create()
    run_dir.launcher_log.write_text(words)
    return StartMonitor(_FACTS, run_dir, limit_s, named_after_s=1.0)




def test_missing_ranks_are_named_again_as_they_change(tmp_path: Path) -> None:
    arrivals = _arrivals(tmp_path)
    assert arrivals.progress_message(_HOSTS, 0.5) is None
    assert arrivals.progress_message({1: "n1", 2: "n2", 3: "n2"}, 1.5) == (
        "3 of 4 ranks have not started after 2 s: rank 1 on n1, ranks 2-3 on n2; launch ends the run after 10 s"
        " (--start-timeout)")
    assert arrivals.progress_message({1: "n1", 2: "n2", 3: "n2"}, 100) is None
    assert "1 of 4 ranks" in (arrivals.progress_message({1: "n1"}, 101) or "")
    assert arrivals.progress_message({}, 109) == "all 4 ranks have started, the last after 109 s"
    assert arrivals.progress_message({}, 110) is None


def test_a_start_in_time_is_not_reported(tmp_path: Path) -> None:
    arrivals = _arrivals(tmp_path)
    assert arrivals.progress_message(_HOSTS, 0.5) is None
    assert arrivals.progress_message({}, 2.0) is None
    assert arrivals.stop_reason({}, 99.0) is None


def test_many_hosts_are_named_in_a_line(tmp_path: Path) -> None:
    hosts = {rank: f"x{rank // 4}" for rank in range(10_000)}
    facts = replace(_FACTS, world_size=len(hosts))
    text = StartMonitor(facts, RunDir(tmp_path).create(), None, named_after_s=1.0).progress_message(hosts, 2.0)
    assert text is not None
    assert len(text) < 400
    assert text.endswith("ranks 32-9999 on 2492 more nodes")


def test_the_deadline(tmp_path: Path) -> None:
    assert _arrivals(tmp_path).stop_reason({3: "n2"}, 9.0) is None
    stop = _arrivals(tmp_path).stop_reason({3: "n2"}, 10.5)
    assert stop is not None
    assert (stop.kind, stop.text.partition(" (")[0]) == ("late", "rank 3 on n2 did not start within 10 s")
    assert _arrivals(tmp_path, limit_s=None).stop_reason({3: "n2"}, 1e6) is None


@pytest.mark.parametrize(("words", "missing", "is_refused"), [
    (_EXECVE, {2: "n2"}, True),
    (_TASK.format("2-3"), {3: "n2"}, True),
    # A rank that has started reports its own end.
    (_TASK.format("0"), {3: "n2"}, False),
    ("a program: all is well\n", {3: "n2"}, False),
])
def test_the_launchers_words_end_it_at_once(tmp_path: Path, words: str, missing: dict[int, str],
                                            is_refused: bool) -> None:
    arrivals = _arrivals(tmp_path, None, words)
    assert arrivals.stop_reason(missing, 3.0) is None  # others may still say more
    stop = arrivals.stop_reason(missing, 6.0)
    assert (stop is not None) is is_refused
    if stop is not None:
        assert (stop.kind, stop.text.startswith(" ".join(words.split()))) == ("refused", True)
    assert arrivals.stop_reason({}, 7.0) is None


def test_nodes_that_cannot_report_are_not_waited_for(tmp_path: Path) -> None:
    """The agent could not start, gave up, or had no disk space for its report."""
    run_dir = RunDir(tmp_path).create()
    life = HeartbeatMonitor(run_dir, "id", {**_HOSTS, 4: "n3", 5: "n3", 6: "n4", 7: "n4"}, started=0.0)
    life.look(1.0)
    assert len(life.missing) == 8
    write_report(run_dir, NodeReport("id", "n1", 0, "running", 1.0, {0: RankReport()}))
    run_dir.rank_heartbeat(3).touch()
    write_report(run_dir, NodeReport("id", "n3", 4, "running", 1.0, {}, error="Traceback\nOSError"))
    run_dir.node_report(6).touch()
    life.look(2.0)
    assert dict(life.missing) == {1: "n1", 2: "n2"}




@pytest.mark.parametrize(("words", "who", "host"), [
    # Observed with MPICH 5.0.2 and OpenSSH 9.2 on simulated nodes.
    ("root@n2: Permission denied (publickey,password,hostbased).", said.SSH, "n2"),
    ("ssh: connect to host n2 port 22: Connection refused", said.SSH, "n2"),
    ("ssh: Could not resolve hostname nope: Temporary failure in name resolution", said.SSH, "nope"),
    # From OpenSSH's sources.
    ("ssh: connect to host n2 port 22: Connection timed out", said.SSH, "n2"),
    ("No ED25519 host key is known for n2 and you have requested strict checking.\nHost key verification failed.",
     said.SSH, "n2"),
    ("Host key verification failed.", said.SSH, None),
    ("Connection closed by 10.0.0.2 port 22", said.SSH, "10.0.0.2"),
    ("bash: line 1: /x/bin/hydra_pmi_proxy: No such file or directory", "mpiexec", None),
    ("bash: line 1: orted: command not found", "mpiexec", None),
    ("/x/python3: No module named ezpz_llm.launch", "Python", None),
    ("/x/python3: Error while finding module specification for 'ezpz_llm.launcher.on_nodes.shim' "
     "(ModuleNotFoundError: No module named 'ezpz_llm')", "Python", None),
    ("slurmstepd: error: execve(): /x/python: No such file or directory", "Slurm", None),
    ("srun: error: Task launch for StepId=3.0 failed on node n2: Invalid job credential", "Slurm", "n2"),
])
def test_messages_of_failed_starts(words: str, who: str, host: str | None) -> None:
    facts = RunFacts(4, ("n1", "n2"), "mpiexec", None, 0.0, scheduler="slurm")
    [found] = read_messages(f"before\n{words}\nafter\n", facts)
    assert (found.source, found.kind, found.host) == (who, said.NOT_STARTED, host)




def test_a_rank_that_never_comes_ends_the_run(tmp_path: Path) -> None:
    late = _late(tmp_path, 'os.environ.get("PMI_RANK") == "1"', 1000)
    began = time.monotonic()
    done = launch(tmp_path, "-n", "2", "--start-timeout", "4", "--run-dir", "r", "sleep", "100", **late)
    assert done.returncode == 124, done.stderr
    assert time.monotonic() - began < scaled(45)
    assert "the launcher could not start the ranks: rank 1 on" in done.stderr
    assert "did not start within 4 s (--start-timeout); launch ended the run" in done.stderr
    assert "under the same paths" in (tmp_path / "r/postmortem.txt").read_text()
    assert record(tmp_path / "r")["exit"]["kind"] == "not_started"
    assert left_over(tmp_path / "r") == {}


@pytest.mark.full
def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    late = _late(tmp_path, 'os.environ.get("PMI_RANK") == "1"', 4)
    done = launch(tmp_path, "-n", "2", "--start-timeout", "0", "--run-dir", "r", "echo", "here", **late)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r/logs/rank0001.log").read_text() == "here\n"


@contextmanager
def _python_missing_on(cluster: Cluster, node: str) -> Iterator[None]:
    """Hide Python on a node, as with an unmounted file system, or an environment on another node's local disk."""
    folder = str(Path(sys.executable).parent)
    mounted = cluster.run("mount", "-t", "tmpfs", "tmpfs", folder, node=node)
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield
    finally:
        cluster.run("umount", folder, node=node)


@pytest.mark.full
def test_python_missing_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    """srun reports it at once, but leaves rank 0 running or waiting alone."""
    with _python_missing_on(cluster, "n2"):
        began = time.monotonic()
        done = cluster.run("salloc", "--quiet", "-N2", "--ntasks-per-node=1", "launch", "--run-dir", "r", "sleep",
                           "100", cwd=tmp_path, timeout=90)
        assert time.monotonic() - began < scaled(60)
    assert done.returncode == 3, done.stderr
    first = next(line for line in done.stderr.splitlines() if "the launcher could not start the ranks" in line)
    assert "n2" in first
    # `python` or `python3`, depending on the first line of the installed `launch`.
    folder = re.escape(str(Path(sys.executable).parent))
    assert re.search(rf"execve\(\): {folder}/python3?: No such file or directory", first)
    assert "check that n2 can read this launch's Python" in done.stderr
    assert cluster.processes(record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"]) == {}


@pytest.mark.full
def test_ranks_that_are_90_seconds_late_are_named_and_come(cluster: Cluster, tmp_path: Path) -> None:
    late = _late(tmp_path, 'os.uname().nodename == "n2"', 90)
    done = cluster.run("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "launch", "--run-dir", "r", "hostname",
                       cwd=tmp_path, timeout=240, **late)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 ranks have not started after 6" in done.stderr
    assert ": ranks 2-3 on n2; launch ends the run after 600 s (--start-timeout)" in done.stderr
    assert (tmp_path / "r/logs/rank0003.log").read_text() == "n2\n"


@contextmanager
def _sshd(cluster: Cluster, node: str, options: str | None) -> Iterator[None]:
    """Restart sshd on the node with other options, or stop it."""
    again = "/usr/sbin/sshd -f /etc/ssh/sshd_config"
    stop = "pkill -x sshd; while pgrep -x sshd > /dev/null; do sleep 0.05; done;"
    cluster.run("bash", "-c", f"{stop} {f'{again} {options}' if options else ''}", node=node)
    try:
        yield
    finally:
        cluster.run("bash", "-c", f"{stop} {again}", node=node)


@pytest.mark.parametrize(("options", "words"), [
    (None, "ssh: connect to host n2 port 22: Connection refused"),
    ("-o AuthorizedKeysFile=none -o HostbasedAuthentication=yes -o KbdInteractiveAuthentication=no",
     "root@n2: Permission denied (publickey,hostbased)."),
])
def test_the_error_of_ssh_is_quoted_first(host_cluster: Cluster, tmp_path: Path, options: str | None,
                                      words: str) -> None:
    with _sshd(host_cluster, "n2", options):
        done = host_cluster.run("launch", "--hosts", "n1,n2", "--run-dir", "r", "sleep", "100", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    text = (tmp_path / "r/postmortem.txt").read_text()
    assert text.startswith(f"launch: n2: the launcher could not start the ranks: {words}\n")
    assert "try: `ssh n2 true` must work from here without a prompt" in text
    assert "HYDRA_LAUNCHER_EXEC=pbs_tmrsh" in text
