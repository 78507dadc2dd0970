"""Kill every process of a run, found by the marker in its environment and by descent, never by name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ezpz_llm.launch.node.folder import agents, strays
from ezpz_llm.launch.node.processes import (
    Kin,
    Process,
    below,
    can_list_children,
    end_all,
    everyone,
    marked,
    read_descendants,
    started_at,
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` to the calling process when its parent ends, however it ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Have the kernel make the calling process the parent of every descendant whose own parent ends."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_marked(run_id: str, within_s: float = 5.0, chosen: Callable[[Process], bool] = lambda process: True,
               roots: Callable[[], Collection[Kin]] = lambda: ()) -> list[int]:
    """Kill what is left of the run on this host and is `chosen`, with all that descends from it or from the `roots`
    and carries no marker; the processes that resist for `within_s`, or are not ours to end, are returned."""
    def find() -> Iterator[Kin]:
        """The run's processes, by its mark in their environment, and all that they started."""
        known, spared = set(roots()), {os.getpid()}
        for one in marked(run_id):
            if chosen(one):
                known.add(Kin(one.pid, one.start))
                yield Kin(one.pid, one.start)
            elif one.is_shim:
                spared.add(one.pid)
        if known:
            yield from below(everyone(), known, spared)

    return end_all(find, within_s)


def descendants(spared: Collection[int]) -> Iterable[Kin]:
    """The living processes below this one, without those `spared` and what is below them."""
    own = Kin(os.getpid(), started_at(os.getpid()))
    if can_list_children():
        return read_descendants(own, spared)
    return below(everyone(), {own}, {own.pid, *spared})


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def detach(keep: Collection[int]) -> None:
    """Cut a forked process loose from its parent's session, signals and descriptors, except `keep`: holding a copy
    of them (the console, PMI's socket) would keep their readers waiting."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


@dataclass
class Janitor:
    """A forked process that ends the run on this host if its owner vanishes without a word."""

    pid: int
    pipe: int

    def dismiss(self) -> None:
        """The owner has ended in order: the janitor has nothing to do."""
        # It may have been killed, and reaped.
        with contextlib.suppress(OSError):
            os.write(self.pipe, b"!")
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_janitor(run_id: str, delay_s: float, first: Callable[[], None] = lambda: None,
                  keep: Collection[int] = (), last: Callable[[], None] = lambda: None) -> Janitor:
    """Fork the janitor of the calling process. Once the owner is gone it does what comes `first`, for which it
    keeps some descriptors, and waits `delay_s`, so that what ends in order may do so; what comes `last` it does in
    the end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_end)
        return Janitor(pid, write_end)
    try:
        detach(keep=(read_end, *keep))
        _watch(read_end, run_id, delay_s, first, last)
    finally:
        os._exit(0)


def _watch(read_end: int, run_id: str, delay_s: float, first: Callable[[], None],
           last: Callable[[], None]) -> None:
    if not os.read(read_end, 1):
        with contextlib.suppress(OSError):
            first()
        # The agent sees by itself that the node's shims have gone, reports it, and goes; its folder goes first.
        kept, noted = agents(run_id), set(strays(run_id))
        time.sleep(delay_s)
        end_marked(run_id, chosen=lambda process: process.pid not in kept, roots=lambda: noted)
        last()
