"""Cleanup of a run whose processes have hostile names, environments and behavior."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile_processes import NAMES, RANKS
from launch_runs import clean_env, launch, left_over, record, start
from places import TESTS
from slowness import scaled

from ezpz_llm.launcher.basics import processes as module
from ezpz_llm.launcher.basics.cleanup import end_marked
from ezpz_llm.launcher.basics.node_folder import agent_pids, parse_heartbeat, remove
from ezpz_llm.launcher.basics.processes import (
    ProcessIdentity,
    by_age,
    list_processes,
    marked_processes,
    read_descendants,
)

_PROGRAM = str(TESTS / "helpers/hostile_processes.py")


def _tagged(tag: str) -> set[int]:
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if tag.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                pids.add(int(folder.name))
    return pids


def _are_gone(tag: str) -> bool:
    """Return True if three scans find no process with the tag: one scan can miss a process that forks and ends."""
    return not any(_tagged(tag) for _ in range(3))


def _wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def tag() -> Iterator[str]:
    """First argument of a test's processes; remaining ones are killed at the end of the test."""
    name = f"ezpz-test-{uuid.uuid4().hex[:12]}"
    yield name
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (left := _tagged(name)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_ends_with_all_of_its_processes(tmp_path: Path, tag: str, code: int) -> None:
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", "sh", "-c",
                  f"{sys.executable} {_PROGRAM} {tag}; exit {code}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "has not reported" not in done.stderr
    assert _are_gone(tag)
    assert left_over(tmp_path / "r") == {}


@pytest.mark.full
@pytest.mark.parametrize("killed", [("shim",), ("shim", "agent")], ids="+".join)
def test_a_run_of_which_some_are_killed(tmp_path: Path, tag: str, killed: tuple[str, ...]) -> None:
    run = start(tmp_path, "-n", "1", "--run-dir", "r", "sh", "-c", f"{sys.executable} {_PROGRAM} {tag}; sleep 600")
    try:
        _wait_for((tmp_path / "r/up0").exists, "the start of all")
        time.sleep(2.5)  # two polling intervals of the agent
        run_id = record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"]
        forks = {process.pid: process.parent for process in marked_processes(run_id) if process.is_shim}
        doomed = {pid for pid, parent in forks.items() if parent not in forks}
        if "agent" in killed:
            doomed |= agent_pids(run_id)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=scaled(60))
        assert run.returncode not in (0, None)
        _wait_for(lambda: _are_gone(tag), "the end of all")
    finally:
        run.kill()
        remove(record(tmp_path / "r")["launch"]["env"]["EZPZ_LLM_RUN_ID"])


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@contextlib.contextmanager
def _started(tmp_path: Path, tag: str, run_id: str) -> Iterator[None]:
    """Start all hostile processes with the run's marker, without a shim as their ancestor."""
    env = clean_env(EZPZ_LLM_RUN_ID=run_id, EZPZ_LLM_RANK="0", EZPZ_LLM_RUN_DIR=str(tmp_path))
    subprocess.run([sys.executable, _PROGRAM, tag], env=env, check=True, timeout=scaled(60))
    _wait_for((tmp_path / "up0").exists, "the start of all")
    yield


def test_the_marker_is_enough(tmp_path: Path, tag: str, run_id: str) -> None:
    with _started(tmp_path, tag, run_id):
        assert end_marked(run_id, within_s=scaled(10)) == []
    # Processes without variables have no marker.
    assert len(_tagged(tag)) == len(NAMES[::2])
    assert not any(list(marked_processes(run_id)) for _ in range(3))


def test_a_hostile_rank_is_a_ranks(tmp_path: Path, tag: str, run_id: str) -> None:
    with _started(tmp_path, tag, run_id):
        processes = list(marked_processes(run_id))
        ours = [process for process in processes if process.pid in _tagged(tag)]
        # All except the process without the variable.
        assert sum(process.is_of_rank for process in ours) >= len(RANKS) + len(NAMES[1::2])
        assert {process.rank for process in ours} == {0, None}
        assert not any(process.is_shim for process in processes)
        end_marked(run_id, within_s=scaled(10))


def test_newest_processes_are_read_first() -> None:
    ended, threads = threading.Event(), []
    children = []
    for _ in range(3):
        threads.append(threading.Thread(target=ended.wait))
        threads[-1].start()
        children.append(subprocess.Popen(["sleep", "600"]))
    try:
        order = list(module._newest_first())
        places = [order.index(child.pid) for child in children]
        assert places == sorted(places, reverse=True)
        assert places[0] < order.index(os.getpid())
        assert len(order) == len(set(order))
        assert not {thread.native_id for thread in threads} & set(order)
    finally:
        ended.set()
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize(("newest", "order"), [(60, [60, 50, 2, 4000, 70]), (0, [4000, 70, 60, 50, 2])])
def test_processes_with_larger_ids_than_the_newest_one_are_the_oldest(newest: int, order: list[int]) -> None:
    assert by_age([50, 60, 70, 4000, 2], newest) == order


@pytest.mark.parametrize("content", [None, "", "0.1 0.2 0.3 1/100 many"])
def test_an_unreadable_newest_id_is_unknown(monkeypatch: pytest.MonkeyPatch, content: str | None,
                                            tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "loadavg").write_text(content)
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / Path(path).name)
    assert module._newest_pid() == 0


def test_descendants_are_those_of_a_whole_look() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"])
    own = ProcessIdentity(child.pid, list_processes()[child.pid].start)
    try:
        _wait_for(lambda: len(list(read_descendants(own, ()))) == 2, "two children")
        below = list(read_descendants(own, ()))
        assert {list_processes()[process.pid].parent for process in below} == {child.pid}
        assert list(read_descendants(own, {below[0].pid})) == below[1:]
    finally:
        for pid in (child.pid, *(process.pid for process in read_descendants(own, ()))):
            os.kill(pid, signal.SIGKILL)
        child.wait()


@pytest.mark.parametrize(("text", "beat"), [("step 3\n", ("step", 3)), ("step \u00b2\n", ("step", None)),
                                            ("step " + "9" * 5000, ("step", None)), ("", (None, None))])
def test_a_heartbeat_of_any_text(text: str, beat: tuple[str | None, int | None]) -> None:
    assert parse_heartbeat(text) == beat
