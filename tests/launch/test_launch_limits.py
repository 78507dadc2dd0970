"""Low limits of a node: open files, and shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, need_mpiexec
from slowness import scaled

from ezpz_llm.launcher.diagnosis.classify import classify
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised

_LAUNCH = f"{sys.executable} -m ezpz_llm.launch -n 2 --run-dir run {sys.executable}"


def _shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=clean_env(), text=True, capture_output=True,
                          timeout=scaled(100), check=False)


def test_a_low_limit_on_open_files_is_named_before_the_start(tmp_path: Path) -> None:
    need_mpiexec()
    done = _shell(f"ulimit -n 16; {_LAUNCH} -c pass", tmp_path)
    assert done.returncode == 3
    assert "a process may open 16 files, but 2 ranks per node need 28" in done.stderr
    assert "run ulimit -n 65536 before the command" in done.stderr
    assert not (tmp_path / "run").exists()
    allowed = _shell(f"ulimit -n 28; {_LAUNCH} -c pass", tmp_path)
    assert allowed.returncode == 0, allowed.stderr


def _failure(message: str | None, signal: str | None = None) -> Failure:
    raised = None if message is None else Raised("OSError", message)
    return Failure(0, "n1", 7, 135 if signal else 1, signal, 1.0, 1.0, exception=raised,
                   shared_memory="/dev/shm is full: 0 of 65536 KiB are free")


@pytest.mark.parametrize(("failure", "name"), [
    (_failure("[Errno 28] No space left on device"), "shared-memory-full"),
    (_failure("[Errno 28] No space left on device: '/dev/shm/x'"), "shared-memory-full"),
    (_failure(None, "SIGBUS"), "shared-memory-full"),
    (_failure("[Errno 28] No space left on device: '/scratch/x'"), "disk-full"),
    (_failure("[Errno 13] Permission denied: '/x'"), "")])
def test_full_shared_memory_is_the_cause_of_an_error_without_a_path(failure: Failure, name: str) -> None:
    finding = classify(failure)
    if name:
        assert finding.name == name
    assert ("/dev/shm is full" in finding.cause) == (name == "shared-memory-full")


@pytest.mark.full
@pytest.mark.parametrize("program", [
    "import multiprocessing; multiprocessing.Queue()", "from mpi4py import MPI; MPI.COMM_WORLD.allreduce(1)"])
def test_full_shared_memory_of_a_node_is_named(tmp_path: Path, program: str) -> None:
    need_mpiexec()
    if os.geteuid():
        pytest.skip("needs root to mount a small /dev/shm")
    (tmp_path / "program.py").write_text(program)
    done = _shell("exec unshare -m bash -c 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "
                  f"(dd if=/dev/zero of=/dev/shm/fill bs=1k || true) && {_LAUNCH} program.py'", tmp_path)
    assert done.returncode != 0
    assert "failed: /dev/shm is full" in done.stderr, done.stderr
    assert "remove files of ended programs there" in done.stderr
