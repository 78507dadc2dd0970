"""The run's processes on this node, as /proc tells of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.base import grouped, system_text
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
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", system_text(f"/proc/{pid}/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def first_of(processes: list[Process]) -> Process:
    """The one that the others descend from."""
    pids = {process.pid for process in processes}
    return next((process for process in processes if process.parent not in pids), processes[0])


_AGAIN_S = 0.02


class Kin(NamedTuple):
    """A process: its number, and when it began (clock ticks since boot), since a number is given out again."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    @classmethod
    def parse(cls, text: str) -> Kin:
        """The reverse of `str`.

        Raises:
            ValueError: it is no such text.
        """
        pid, start = text.split()
        return cls(int(pid), int(start))

    def is_there(self) -> bool:
        """True while the process lives; another one with its number does not count."""
        try:
            return started_at(self.pid) == self.start
        except OSError:
            return False


class Seen(NamedTuple):
    """What /proc says of one process."""

    parent: int
    start: int
    has_ended: bool


def everyone(is_own_only: bool = False) -> dict[int, Seen]:
    """All processes on this node, by their numbers; or those of this user, which is cheaper to ask often."""
    found, uid = {}, os.getuid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if is_own_only and entry.stat().st_uid != uid:
                continue
            numbers = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            # It ended while we looked.
            continue
        # The main thread of a process may have ended before the others.
        has_ended = numbers[0] in (b"Z", b"X") and int(numbers[17]) <= 1
        found[int(entry.name)] = Seen(int(numbers[1]), int(numbers[19]), has_ended)
    return found


def below(seen: dict[int, Seen], roots: Iterable[Kin], spared: Collection[int] = ()) -> set[Kin]:
    """The living descendants of the `roots`, and the roots themselves. What is `spared` is left out with all below
    it, but for a root, of which only itself is."""
    children = grouped((one.parent, pid) for pid, one in seen.items())
    known = {root.pid for root in roots if root.pid in seen and seen[root.pid].start == root.start}
    ahead = list(known)
    while ahead:
        for pid in children.get(ahead.pop(), ()):
            if pid not in known and pid not in spared:
                known.add(pid)
                ahead.append(pid)
    return {Kin(pid, seen[pid].start) for pid in known if pid not in spared and not seen[pid].has_ended}


def end_all(find: Callable[[], Collection[Kin]], within_s: float) -> list[int]:
    """Kill what `find` finds until it finds nothing more: stopped first, so that what forks all the time comes to
    an end. The processes that resist, or are not ours to end, are returned."""
    began = time.monotonic()
    stopped: set[Kin] = set()
    others: set[Kin] = set()
    while left := set(find()) - others:
        lasted_s = time.monotonic() - began
        if lasted_s > within_s:
            break
        new = left - stopped
        others |= {who for who in new if not _send(who, signal.SIGSTOP)}
        stopped |= new
        if new and lasted_s < within_s / 2:
            continue
        for who in left:
            _send(who, signal.SIGKILL)
        time.sleep(_AGAIN_S)
    return sorted(who.pid for who in left | others if who.is_there())


def _send(who: Kin, number: signal.Signals) -> bool:
    """Signal it, if it is still the same process; False where that is not permitted."""
    try:
        if who.is_there():
            os.kill(who.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True
