"""Stop a run on every node, even if its launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from ezpz_llm.launch.cleanup import end_marked
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.liveness import HeartbeatMonitor
from ezpz_llm.launch.node.messages import (
    ENDED,
    RANKS_ENDED,
    NodeReport,
    StopOrder,
    control_interval_s,
    order_stop,
    read_reports,
)
from ezpz_llm.launch.node.processes import marked
from ezpz_llm.launch.plan import LaunchPlan
from ezpz_llm.launch.relay import warn
from ezpz_llm.launch.schedulers import scheduler_here
from ezpz_llm.rundir import RunDir

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


class Teardown:
    """Stops one run, whose launcher is `launcher`, and sees that nothing of it is left on any node."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], life: HeartbeatMonitor) -> None:
        self._plan = plan
        self._launcher = launcher
        self._life = life
        self._scheduler = scheduler_here(os.environ)
        self._order_s = control_interval_s(len(plan.hosts))
        self._is_hang = False
        self._received = ""

    def stop(self, grace_s: float, is_urgent: Callable[[], bool], is_hang: bool = False,
             received: str = "") -> None:
        """End the ranks through their nodes' agents, which is the same under every launcher and leaves them
        `grace_s` to say their last words; then the launcher. `is_urgent`: nobody wants to wait any longer.
        `is_hang`: the ranks are to say where they stand. `received`: see `StopOrder`."""
        self._is_hang, self._received = is_hang, received
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
            order_stop(self._plan.run_dir,
                       StopOrder(self._plan.run_id, grace_s, socket.gethostname(), self._is_hang,
                                 self._received))

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
        return sorted({step for node in self._life.nodes if (step := node.slurm_step) and step != own})

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
    return rank_ranges(report.ranks) if report.ranks else "its ranks"
