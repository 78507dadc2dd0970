"""The run's processes on this node, as /proc tells of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.launch.variables import RANK_VARIABLE, RUN_ID_VARIABLE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SHIM = b"ezpz_llm.launch.shim"


@dataclass(frozen=True)
class Process:
    """One marked process. `rank` is None for launchers, shims and what they forked; `processor_s` are the seconds
    of processor time that it and its ended children have used; `state` is the kernel's letter; `name` is the
    program's, cut to 15 characters."""

    pid: int
    parent: int
    rank: int | None
    is_shim: bool
    state: str
    processor_s: float
    name: str = ""


def marked(run_id: str) -> Iterator[Process]:
    """Our own user's living processes on this node that carry the run's marker, except this one."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    uid, own = os.getuid(), os.getpid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        try:
            if entry.stat().st_uid != uid:
                continue
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            if marker in variables:
                yield _read(int(entry.name), variables)
        except OSError:
            # It ended while we looked, or it is not ours to read.
            continue


def _read(pid: int, variables: list[bytes]) -> Process:
    name, numbers = _stat(pid)
    prefix = f"{RANK_VARIABLE}=".encode()
    rank = next((int(one[len(prefix):]) for one in variables if one.startswith(prefix)), None)
    is_shim = rank is None and _SHIM in Path(f"/proc/{pid}/cmdline").read_bytes()
    used = sum(int(ticks) for ticks in numbers[11:15]) / _TICKS_PER_S
    return Process(pid, int(numbers[1]), rank, is_shim, numbers[0], used, name)


def _stat(pid: int) -> tuple[str, list[str]]:
    # The command's name, in parentheses, may hold blanks: the fields from the state (the third) on begin after it.
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return name.partition("(")[2], rest.split()


def started_at(pid: int) -> int:
    """When the process began, in clock ticks since the node's boot.

    Raises:
        OSError: there is no such process.
    """
    return int(_stat(pid)[1][19])


def place() -> str:
    """Where process numbers mean the same: this boot, and this namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def is_alive(pid: int, start: int) -> bool:
    """Does the process that began at `start` live? One that only waits to be reaped does not."""
    try:
        _, numbers = _stat(pid)
    except OSError:
        return False
    return int(numbers[19]) == start and numbers[0] not in "ZX"


def catches(pid: int, number: int) -> bool:
    """Has the process a handler for the signal? One without would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def first_of(processes: list[Process]) -> Process:
    """The one that the others descend from."""
    pids = {process.pid for process in processes}
    return next((process for process in processes if process.parent not in pids), processes[0])
