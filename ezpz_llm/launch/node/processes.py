"""The run's processes on this node, as /proc tells of them."""

from __future__ import annotations

import contextlib
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
_SHIM = [b"-m", b"ezpz_llm.launch.shim"]
_MOST_RANK_DIGITS = 9


@dataclass(frozen=True)
class Process:
    """One marked process.

    Attributes:
        start: when it began, in clock ticks since the node's boot.
        rank: None for launchers, shims and what they forked, and where the variable holds no number.
        is_of_rank: whether it has the variable of a rank, with any value.
        is_shim: whether it is a shim, or was forked from one.
        state: the kernel's letter.
        processor_s: seconds of processor time that it and its ended children have used.
        name: the program's, cut to 15 bytes.
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


def marked(run_id: str) -> Iterator[Process]:
    """Our own user's living processes on this node that carry the run's marker, except this one.

    The newest come first: a process that lives for 2 ms and leaves a child would be gone when its turn came."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    uid, own = os.getuid(), os.getpid()
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        try:
            if pid == own or os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if marker in variables:
                yield _read(pid, variables)
        except OSError:
            # It ended while we looked, or it is not ours to read.
            continue


def _read(pid: int, variables: list[bytes]) -> Process:
    name, numbers = _stat(pid)
    prefix = f"{RANK_VARIABLE}=".encode()
    value = next((one[len(prefix):] for one in variables if one.startswith(prefix)), None)
    # A program may set the variable to any text.
    rank = int(value) if value is not None and value.isdigit() and len(value) <= _MOST_RANK_DIGITS else None
    is_shim = value is None and Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == _SHIM
    used = sum(int(ticks) for ticks in numbers[11:15]) / _TICKS_PER_S
    return Process(pid, int(numbers[1]), int(numbers[19]), rank, value is not None, is_shim, numbers[0], used, name)


def _stat(pid: int) -> tuple[str, list[str]]:
    # The command's name, in parentheses, may hold any bytes, and the kernel cuts it within a character: the fields
    # from the state (the third) on begin after it.
    name, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return name.partition(b"(")[2].decode(errors="replace"), rest.decode().split()


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
_EMPTY_LOOKS = 2


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
            found[int(entry.name)] = _seen(int(entry.name))
        except OSError:
            # It ended while we looked.
            continue
    return found


def _seen(pid: int) -> Seen:
    _, numbers = _stat(pid)
    # The main thread of a process may have ended before the others.
    has_ended = numbers[0] in ("Z", "X") and int(numbers[17]) <= 1
    return Seen(int(numbers[1]), int(numbers[19]), has_ended)


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


def read_descendants(root: Kin, spared: Collection[int]) -> Iterator[Kin]:
    """The living processes below `root`, each before its own children are read, so that a caller can stop it first.
    What is `spared` is left out with all below it."""
    known, ahead = {root.pid, *spared}, [root.pid]
    while ahead:
        for pid in _children(ahead.pop()):
            if pid in known:
                continue
            known.add(pid)
            ahead.append(pid)
            with contextlib.suppress(OSError):
                one = _seen(pid)
                if not one.has_ended:
                    yield Kin(pid, one.start)


def _children(pid: int) -> list[int]:
    """The children of all threads of a process; none of one that has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            # One that ends meanwhile leaves its children to another.
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def can_list_children() -> bool:
    """Return True if the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def end_all(find: Callable[[], Iterable[Kin]], within_s: float) -> list[int]:
    """Kill what `find` gives until it gives nothing more, twice in a row, since one look can miss a process that
    forks and ends. Return the processes that resist, or that this user may not end.

    Each is stopped as soon as it is given, which ends even a process that forks every millisecond."""
    began = time.monotonic()
    stopped: set[Kin] = set()
    others: set[Kin] = set()
    left: set[Kin] = set()
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS and (lasted_s := time.monotonic() - began) <= within_s:
        left, is_new = set(), False
        for who in find():
            if who in others:
                continue
            if who not in stopped:
                if not _send(who, signal.SIGSTOP):
                    others.add(who)
                    continue
                stopped.add(who)
                is_new = True
            left.add(who)
        empty_looks = 0 if left else empty_looks + 1
        if is_new and lasted_s < within_s / 2:
            continue
        for who in left:
            _send(who, signal.SIGKILL)
        if left:
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
