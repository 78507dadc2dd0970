"""Nothing of a run outlives it: its processes are known by the run's own marker in their environment, never by
name, and ended on this host whatever became of the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.launch.variables import RUN_ID_VARIABLE

_PR_SET_PDEATHSIG = 1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` to the calling process when its parent ends, however it ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def marked_processes(run_id: str) -> Iterator[int]:
    """Our own user's living processes on this host that carry the run's marker, except this one."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    uid, own = os.getuid(), os.getpid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        try:
            if entry.stat().st_uid == uid and marker in Path(entry.path, "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            # It ended while we looked, or it is not ours to read.
            continue


def end_marked(run_id: str, within_s: float = 5.0) -> list[int]:
    """Kill what is left of the run on this host; the processes that resist for `within_s` are returned."""
    deadline = time.monotonic() + within_s
    while left := list(marked_processes(run_id)):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            _kill(pid)
        time.sleep(0.02)
    return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Janitor:
    """A forked process that ends the run on this host if its owner vanishes without a word."""

    pid: int
    pipe: int

    def dismiss(self) -> None:
        """The owner has ended in order: the janitor has nothing to do."""
        os.write(self.pipe, b"!")
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def start_janitor(run_id: str, delay_s: float) -> Janitor:
    """Fork the janitor of the calling process. Once the owner is gone it waits `delay_s`, so that what ends in
    order may do so."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_end)
        return Janitor(pid, write_end)
    try:
        _watch(read_end, run_id, delay_s)
    finally:
        os._exit(0)


def _watch(read_end: int, run_id: str, delay_s: float) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Holding a copy of the owner's descriptors (the console, PMI's socket) would keep their readers waiting.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != read_end:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if not os.read(read_end, 1):
        time.sleep(delay_s)
        end_marked(run_id)
