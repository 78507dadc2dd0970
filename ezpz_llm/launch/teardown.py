"""The end of a run: all of it, on every node, whatever became of the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ezpz_llm.launch.liveness import HeartbeatMonitor
from ezpz_llm.launch.node.descent import Kin, below, end_all, everyone
from ezpz_llm.launch.node.folder import agents, strays
from ezpz_llm.launch.node.orders import StopOrder, order_stop
from ezpz_llm.launch.node.processes import Process, marked, started_at
from ezpz_llm.launch.node.report import ENDED, RANKS_ENDED, NodeReport, control_interval_s, read_reports
from ezpz_llm.launch.plan import LaunchPlan
from ezpz_llm.launch.relay import warn
from ezpz_llm.launch.schedulers import scheduler_here
from ezpz_llm.rundir.paths import RunDir

_POLL_S = 0.1
_AT_ONCE_S = 1.0
"""The grace where nobody is left who could use more: a second Ctrl-C, a launcher that has gone."""
_LAUNCHER_S = 2.0
"""What the launcher gets to end by itself after its ranks, and again after SIGTERM."""
_NODES_WITHIN_S = 12.0
"""How long nodes may take to report that they are clear, besides the time they take to look for orders."""
_ASK_SLURM_AFTER_S = 2.0
_AGENTS_COME_S = 3.0
"""How long ranks that have just been started may take to get their agent."""


class Ending:
    """Ends one run whose launcher is `launcher`."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], life: HeartbeatMonitor) -> None:
        self._plan = plan
        self._launcher = launcher
        self._life = life
        self._scheduler = scheduler_here(os.environ)
        self._order_s = control_interval_s(len(plan.hosts))

    def stop(self, grace_s: float, is_urgent: Callable[[], bool]) -> None:
        """End the ranks through their nodes' agents, which is the same under every launcher and leaves them
        `grace_s` to say their last words; then the launcher. `is_urgent`: nobody wants to wait any longer."""
        self._order(grace_s)
        deadline = time.monotonic() + _AGENTS_COME_S
        while not (is_everywhere := self._is_everywhere()) and time.monotonic() < deadline and not is_urgent():
            time.sleep(_POLL_S)
        if not is_everywhere:
            # Ranks that have no agent only the launcher knows.
            self._signal(signal.SIGTERM)
        self._wait(grace_s + self._order_s + _LAUNCHER_S, is_urgent)
        if self._launcher.poll() is None:
            if is_urgent():
                self._order(0.0)
            self._signal(signal.SIGTERM)
            self._wait(_LAUNCHER_S, lambda: False)
        if self._launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            # srun that could not end its step has left it to Slurm, which would wait for the ranks.
            self._cancel_step()

    def clear(self) -> None:
        """Wait until every node has reported that nothing of the run is left there, or Slurm says so; the launcher
        has ended. What cannot be confirmed is said."""
        if self._unclear():
            self._await_nodes()
        for report in self._life.nodes:
            if report.left:
                warn(f"processes {list(report.left)} on {report.host} cannot be ended")

    def _await_nodes(self) -> None:
        self._order(_AT_ONCE_S)
        began = time.monotonic()
        limit_s = _NODES_WITHIN_S + self._order_s + self._life.interval_s
        ask_at = began + _ASK_SLURM_AFTER_S
        while (unclear := self._unclear()) and time.monotonic() - began < limit_s:
            if time.monotonic() > ask_at:
                if self._step_is_over():
                    break
                self._cancel_step()
                ask_at = time.monotonic() + limit_s / 4
            time.sleep(_POLL_S)
        for report in [] if self._step_is_over() else unclear:
            warn(f"{report.host} has not reported the end of {_awaited(report)}: it is down, or processes may be "
                 f"left there")

    def _unclear(self) -> list[NodeReport]:
        self._life.look(time.monotonic())
        return [report for report in self._life.nodes if report.state != ENDED]

    def _is_everywhere(self) -> bool:
        self._life.look(time.monotonic())
        seen = {rank for report in self._life.nodes for rank in report.ranks}
        return len(seen) == len(self._plan.ranks)

    def _order(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            order_stop(self._plan.run_dir, StopOrder(self._plan.run_id, grace_s, socket.gethostname()))

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._launcher.send_signal(number)

    def _wait(self, seconds: float, is_urgent: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._launcher.poll() is None and time.monotonic() < deadline and not is_urgent():
            time.sleep(_POLL_S)

    def _steps(self) -> list[str]:
        """The scheduler's steps in which the agents ran: ours, but for one that launch itself stands in."""
        own = self._scheduler.own_step(os.environ) if self._scheduler else None
        return sorted({report.slurm_step for report in self._life.nodes} - {None, own})

    def _cancel_step(self) -> None:
        if self._scheduler and (steps := self._steps()):
            self._scheduler.kill_steps(steps)

    def _step_is_over(self) -> bool:
        """Slurm ends all processes of a step, agents too, when it is cancelled or out of time: no report comes
        then, and only the scheduler knows when the last of them has gone."""
        steps = self._steps()
        if not self._scheduler or not steps or any(report.slurm_step is None for report in self._unclear()):
            return False
        return self._scheduler.steps_are_over(steps)


def end_killed(run_dir: RunDir, run_id: str) -> None:
    """End what a launch that was killed on this host left running: its nodes are told, as its own janitor tells
    them, and waited for as long as they may take."""
    with contextlib.suppress(OSError):
        order_stop(run_dir, StopOrder(run_id, _AT_ONCE_S, ""))
    deadline = time.monotonic() + _NODES_WITHIN_S
    while time.monotonic() < deadline and (
            any(marked(run_id)) or any(report.state != ENDED for report in read_reports(run_dir, run_id))):
        time.sleep(_POLL_S)
    if left := end_marked(run_id):
        warn(f"processes {left} of the launch before cannot be ended")


def _awaited(report: NodeReport) -> str:
    """What a node has not cleared yet, by its last report."""
    if report.state == RANKS_ENDED:
        return "the launcher's own processes"
    return f"rank(s) {', '.join(map(str, report.ranks))}" if report.ranks else "its ranks"


# Nothing of a run outlives it: its processes are known by the run's own marker in their environment and by their
# descent, never by name, and ended on this host whatever became of the one that started them.
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
    def find() -> set[Kin]:
        processes, known = list(marked(run_id)), set(roots())
        if not processes and not known:
            return set()
        seen = everyone()
        mine = {Kin(one.pid, seen[one.pid].start) for one in processes if one.pid in seen and chosen(one)}
        others = {one.pid for one in processes if not chosen(one)}
        return below(seen, mine | known, {os.getpid(), *others})

    return end_all(find, within_s)


def descendants(spared: Collection[int]) -> set[Kin]:
    """The living processes below this one, without those `spared` and what is below them."""
    own = Kin(os.getpid(), started_at(os.getpid()))
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
                  keep: Collection[int] = ()) -> Janitor:
    """Fork the janitor of the calling process. Once the owner is gone it does what comes `first`, for which it
    keeps some descriptors, and waits `delay_s`, so that what ends in order may do so."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_end)
        return Janitor(pid, write_end)
    try:
        detach(keep=(read_end, *keep))
        _watch(read_end, run_id, delay_s, first)
    finally:
        os._exit(0)


def _watch(read_end: int, run_id: str, delay_s: float, first: Callable[[], None]) -> None:
    if not os.read(read_end, 1):
        with contextlib.suppress(OSError):
            first()
        # The agent sees by itself that the node's shims have gone, reports it, and goes; its folder goes first.
        kept, noted = agents(run_id), {Kin.parse(who) for who in strays(run_id)}
        time.sleep(delay_s)
        end_marked(run_id, chosen=lambda process: process.pid not in kept, roots=lambda: noted)
