"""Processes by descent: what a rank started is found below its shim, whatever it did to its session, its signals or
its environment. Shims are child subreapers, so that a process whose parent has ended stays below them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.base.private import PrivateFolder
from ezpz_llm.launch.node.folder import STRAYS, registered
from ezpz_llm.launch.node.processes import Process, started_at

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
    children: dict[int, list[int]] = {}
    for pid, one in seen.items():
        children.setdefault(one.parent, []).append(pid)
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


# Processes below a node's shims that do not carry the run's marker: noted by the agent while they can be told by
# their descent, since they cannot any more once their shim is killed.
class Strays:
    """Remembers them from one look to the next."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self.known: set[Kin] = set()

    def look(self, processes: Iterable[Process]) -> None:
        """Note those that there are now. `processes` are all that carry the marker."""
        seen = everyone(is_own_only=True)
        of_ranks = {one.pid for one in processes if one.rank is not None}
        # Launchers, shims and what they forked: what belongs to a rank is below these.
        others = {os.getpid(), *(one.pid for one in processes if one.rank is None)}
        roots = {*self.roots(), *(Kin(pid, seen[pid].start) for pid in of_ranks if pid in seen)}
        now = {who for who in below(seen, roots, others) if who.pid not in of_ranks}
        if now != self.known:
            self.known = now
            self._write()

    def roots(self) -> set[Kin]:
        """What they, and their own children, descend from."""
        return self.known | {Kin.parse(who) for who in registered(self._folder).values() if " " in who}

    def _write(self) -> None:
        # For the janitors, should the agent be killed too.
        with contextlib.suppress(OSError):
            self._folder.write(STRAYS, "".join(f"{who}\n" for who in self.known).encode())
