"""Processes of a run on this node, read from /proc."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import group_by_key, system_text
from ezpz_llm.launcher.basics.variables import RANK_VARIABLE, RUN_ID_VARIABLE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SHIM = [b"-m", b"ezpz_llm.launcher.on_nodes.shim"]
_MAX_RANK_DIGITS = 9
_AHEAD = 4
"""Number of ids above the newest one that a scan also reads."""
_MAX_PIDS = 2 ** 22
"""Maximum of Linux's pid_max."""


@dataclass(frozen=True)
class Process:
    """Process that carries the run's marker.

    Attributes:
        start: start time in clock ticks since the node's boot.
        rank: None for launchers, shims and their forks, and if the variable is not a number.
        is_of_rank: True if the process has the rank variable, with any value.
        is_shim: True for shims and their forks.
        state: the kernel's letter, such as R or D.
        processor_s: CPU seconds of the process and its ended children.
        name: the program's name, truncated to 15 bytes.
    """

    pid: int
    parent: int
    start: int
    rank: int | None
    is_of_rank: bool
    is_shim: bool
    state: str
    processor_s: float
    name: str = ""


def marked_processes(run_id: str) -> Iterator[Process]:
    """Yield this user's live processes on this node that carry the run's marker, except this one.

    The newest come first: otherwise a process that lives for 2 ms and leaves a child would end before it is read.
    """
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    uid, own_pid = os.getuid(), os.getpid()
    for pid in _newest_first():
        try:
            if pid == own_pid or os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if marker in variables:
                yield _read(pid, variables)
        except OSError:
            # The process has just ended, or is not readable.
            continue


def _newest_first() -> Iterator[int]:
    """Yield the ids of this node's processes, the newest first."""
    newest = _newest_pid()
    listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    # Listing thousands of processes takes several milliseconds, in which others start.
    later = range(_newest_pid() + _AHEAD, newest, -1)
    yield from filter(_is_process, later)
    yield from by_age(listed.difference(later), newest)


def by_age(pids: Iterable[int], newest: int) -> list[int]:
    """Sort process ids by age, the newest first.

    The kernel assigns ascending ids, and starts again at the smallest one. If `newest` is 0, sort by id.
    """
    return sorted(pids, key=lambda pid: (newest - pid) % _MAX_PIDS)


def _newest_pid() -> int:
    """Return the id that the kernel assigned last, to a process or a thread; 0 if it is unknown."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_process(pid: int) -> bool:
    """Return True if `pid` is the id of a process. /proc has the threads, too, but does not list them."""
    try:
        return f"\nTgid:\t{pid}\n" in Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False


def _read(pid: int, variables: list[bytes]) -> Process:
    name, numbers = _stat(pid)
    prefix = f"{RANK_VARIABLE}=".encode()
    value = next((variable[len(prefix):] for variable in variables if variable.startswith(prefix)), None)
    # A program may set the variable to any text.
    rank = int(value) if value is not None and value.isdigit() and len(value) <= _MAX_RANK_DIGITS else None
    is_shim = value is None and Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == _SHIM
    used = sum(int(ticks) for ticks in numbers[11:15]) / _TICKS_PER_S
    return Process(pid, int(numbers[1]), int(numbers[19]), rank, value is not None, is_shim, numbers[0], used, name)


def _stat(pid: int) -> tuple[str, list[str]]:
    # The command's name, in parentheses, may hold any bytes, and may be truncated within a character. The state
    # (third field) and all later fields follow it.
    name, _, fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return name.partition(b"(")[2].decode(errors="replace"), fields.decode().split()


def started_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since the node's boot.

    Raises:
        OSError: there is no such process.
    """
    return int(_stat(pid)[1][19])


def pid_namespace_id() -> str:
    """Return a string that identifies the boot and the PID namespace, in which process ids are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def is_alive(pid: int, start: int) -> bool:
    """Return True if the process that started at `start` is alive; zombies are not."""
    try:
        _, numbers = _stat(pid)
    except OSError:
        return False
    return int(numbers[19]) == start and numbers[0] not in "ZX"


def has_signal_handler(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal, which otherwise would kill it."""
    return _has_signal(pid, number, "SigCgt")


def awaits_signal(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal, or blocks it to read it later."""
    return _has_signal(pid, number, "SigCgt") or _has_signal(pid, number, "SigBlk")


def _has_signal(pid: int, number: int, field: str) -> bool:
    match = re.search(rf"^{field}:\s*([0-9a-f]+)", system_text(f"/proc/{pid}/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def find_ancestor(processes: list[Process]) -> Process:
    """Return the process from which the other processes descend."""
    pids = {process.pid for process in processes}
    return next((process for process in processes if process.parent not in pids), processes[0])


_POLL_S = 0.02
_EMPTY_SCANS = 2


class ProcessIdentity(NamedTuple):
    """Identity of a process: its id and start time (clock ticks since boot), since process ids are reused."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity:
        """Parse the result of `str`.

        Raises:
            ValueError: invalid text.
        """
        pid, start = text.split()
        return cls(int(pid), int(start))

    def exists(self) -> bool:
        """Return True while the process exists; another process with the same id is ignored."""
        try:
            return started_at(self.pid) == self.start
        except OSError:
            return False


class ProcessFields(NamedTuple):
    """Fields of one process in /proc."""

    parent: int
    start: int
    has_ended: bool


def list_processes(is_own_only: bool = False) -> dict[int, ProcessFields]:
    """Return all processes on this node by process id, or only those of this user, which is cheaper."""
    processes, uid = {}, os.getuid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if is_own_only and entry.stat().st_uid != uid:
                continue
            processes[int(entry.name)] = _read_fields(int(entry.name))
        except OSError:
            # The process has just ended.
            continue
    return processes


def _read_fields(pid: int) -> ProcessFields:
    _, numbers = _stat(pid)
    # A process whose main thread has ended may still have other threads.
    has_ended = numbers[0] in ("Z", "X") and int(numbers[17]) <= 1
    return ProcessFields(int(numbers[1]), int(numbers[19]), has_ended)


def find_descendants(seen: dict[int, ProcessFields], roots: Iterable[ProcessIdentity],
                     spared: Collection[int] = ()) -> set[ProcessIdentity]:
    """Return the `roots` and their live descendants.

    `spared` processes are excluded with their descendants; of a spared root, only the root itself is excluded.
    """
    children = group_by_key((process.parent, pid) for pid, process in seen.items())
    pids = {root.pid for root in roots if root.pid in seen and seen[root.pid].start == root.start}
    queue = list(pids)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in pids and pid not in spared:
                pids.add(pid)
                queue.append(pid)
    return {ProcessIdentity(pid, seen[pid].start) for pid in pids if pid not in spared and not seen[pid].has_ended}


def read_descendants(root: ProcessIdentity, spared: Collection[int]) -> Iterator[ProcessIdentity]:
    """Yield the live descendants of `root`, each before its children are read.

    The caller can thus stop a process before it creates more. `spared` processes are excluded with their
    descendants.
    """
    visited, queue = {root.pid, *spared}, [root.pid]
    while queue:
        for pid in _children(queue.pop()):
            if pid in visited:
                continue
            visited.add(pid)
            queue.append(pid)
            with contextlib.suppress(OSError):
                process = _read_fields(pid)
                if not process.has_ended:
                    yield ProcessIdentity(pid, process.start)


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process; empty if it has ended."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            # The children of an ending thread move to another thread.
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return children


def can_list_children() -> bool:
    """Return True if the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def end_all(find: Callable[[], Iterable[ProcessIdentity]], within_s: float) -> list[int]:
    """Kill the processes that `find` returns until it returns none twice in a row; return the ids of survivors.

    A single call can miss a process that forks and exits. Each process is first stopped with SIGSTOP, which catches
    even a process that forks every millisecond. Survivors do not die in time, or belong to another user.
    """
    began = time.monotonic()
    stopped: set[ProcessIdentity] = set()
    unpermitted: set[ProcessIdentity] = set()
    alive: set[ProcessIdentity] = set()
    empty_scans = 0
    while empty_scans < _EMPTY_SCANS and (lasted_s := time.monotonic() - began) <= within_s:
        alive, is_new = set(), False
        for process in find():
            if process in unpermitted:
                continue
            if process not in stopped:
                if not _send(process, signal.SIGSTOP):
                    unpermitted.add(process)
                    continue
                stopped.add(process)
                is_new = True
            alive.add(process)
        empty_scans = 0 if alive else empty_scans + 1
        if is_new and lasted_s < within_s / 2:
            continue
        for process in alive:
            _send(process, signal.SIGKILL)
        if alive:
            time.sleep(_POLL_S)
    return sorted(process.pid for process in alive | unpermitted if process.exists())


def _send(process: ProcessIdentity, number: signal.Signals) -> bool:
    """Send a signal if the process still exists; return False without permission."""
    try:
        if process.exists():
            os.kill(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def allow_many_files() -> None:
    """Raise the soft limit on open files to the hard one: a rank may connect to all others.

    The usual soft limit of 1024 exists only for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
