"""Cleanup of a run: kill all its processes, found by a marker in their environment or by descent, never by name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ezpz_llm.launcher.basics.node_folder import agent_pids, strays
from ezpz_llm.launcher.basics.processes import (
    Process,
    ProcessIdentity,
    can_list_children,
    end_all,
    find_descendants,
    list_processes,
    marked_processes,
    read_descendants,
    started_at,
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def die_with_parent(number: signal.Signals) -> None:
    """Make the kernel send `number` to this process when its parent ends for any reason."""
    _libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent exits (a child subreaper)."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_marked(run_id: str, within_s: float = 5.0, chosen: Callable[[Process], bool] = lambda process: True,
               roots: Callable[[], Collection[ProcessIdentity]] = lambda: ()) -> list[int]:
    """Kill the remaining processes of a run on this node, and all their descendants.

    Args:
        chosen: returns True for each process with the run's marker that should be killed.
        roots: further processes whose descendants are killed even if they carry no marker.

    Returns:
        Processes that are still alive after `within_s`, or that this user may not kill.
    """
    def find() -> Iterator[ProcessIdentity]:
        """Yield the chosen processes with the run's marker and all their descendants."""
        ancestors, spared = set(roots()), {os.getpid()}
        for process in marked_processes(run_id):
            if chosen(process):
                ancestors.add(ProcessIdentity(process.pid, process.start))
                yield ProcessIdentity(process.pid, process.start)
            elif process.is_shim:
                spared.add(process.pid)
        if ancestors:
            yield from find_descendants(list_processes(), ancestors, spared)

    return end_all(find, within_s)


def descendants(spared: Collection[int]) -> Iterable[ProcessIdentity]:
    """Return the live descendants of this process, except `spared` and their descendants."""
    this_process = ProcessIdentity(os.getpid(), started_at(os.getpid()))
    if can_list_children():
        return read_descendants(this_process, spared)
    return find_descendants(list_processes(), {this_process}, {this_process.pid, *spared})


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def detach(keep: Collection[int]) -> None:
    """Detach a forked process from its parent's session, signals and file descriptors.

    Readers of these descriptors (the console, PMI's socket) would wait as long as the process keeps copies open.

    Args:
        keep: descriptors to leave open.
    """
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
    """A forked process that ends the run on this node if its owner is killed."""

    pid: int
    pipe: int

    def dismiss(self) -> None:
        """Make the janitor exit without ending the run, since its owner exits normally."""
        # The janitor may have been killed and reaped already.
        with contextlib.suppress(OSError):
            os.write(self.pipe, b"!")
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_janitor(run_id: str, delay_s: float, first: Callable[[], None] = lambda: None,
                  keep: Collection[int] = (), last: Callable[[], None] = lambda: None) -> Janitor:
    """Fork the janitor of this process, its owner.

    Once the owner is killed, the janitor calls `first`, waits `delay_s` so that processes can exit normally, kills
    the rest, and calls `last`.

    Args:
        keep: file descriptors that `first` needs.
    """
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
        # Spare the agent: it notices that the node's shims are gone, reports it, and exits. Read both lists now:
        # they come from the agent's folder, which is removed during the delay.
        spared, stray_roots = agent_pids(run_id), set(strays(run_id))
        time.sleep(delay_s)
        end_marked(run_id, chosen=lambda process: process.pid not in spared, roots=lambda: stray_roots)
        last()
