"""Teardown of a run on every node, even if its launcher has died."""

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
"""Grace period after a second Ctrl-C, or if the launcher has exited."""
_LAUNCHER_S = 2.0
"""Time for the launcher to exit after its ranks, and again after SIGTERM."""
_NODES_WITHIN_S = 12.0
"""Time for nodes to report that they are clear, in addition to their polling interval."""
_ASK_SLURM_AFTER_S = 2.0
_AGENTS_COME_S = 3.0
"""Time for ranks that have just started to get their agent."""


class Teardown:
    """Teardown of one run: ends its ranks and its launcher, and checks every node for remaining processes."""

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
        """End the ranks through the agents of their nodes, which works with every launcher; then end the launcher.

        Args:
            grace_s: time from SIGTERM to SIGKILL.
            is_urgent: returns True once the user does not want to wait any longer.
            is_hang: the ranks print their stacks.
            received: see `StopOrder`.
        """
        self._is_hang, self._received = is_hang, received
        self._order(grace_s)
        deadline = time.monotonic() + _AGENTS_COME_S
        while not (is_everywhere := self._is_everywhere()) and time.monotonic() < deadline and not is_urgent():
            time.sleep(_POLL_S)
        if not is_everywhere:
            # Only the launcher can end ranks without an agent.
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
            # srun could not end its step, and Slurm would wait for the ranks.
            self._cancel_step()

    def clear(self) -> None:
        """Wait until every node or Slurm reports that no process of the run is left; warn if that is not confirmed.

        The launcher must have ended.
        """
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
        reporting = {rank for report in self._life.nodes for rank in report.ranks}
        return len(reporting) == len(self._plan.ranks)

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
        """Return the scheduler's steps in which the agents ran, except one in which launch itself runs."""
        own_step = self._scheduler.own_step(os.environ) if self._scheduler else None
        return sorted({step for node in self._life.nodes if (step := node.slurm_step) and step != own_step})

    def _cancel_step(self) -> None:
        if self._scheduler and (steps := self._steps()):
            self._scheduler.kill_steps(steps)

    def _step_is_over(self) -> bool:
        """Return True if the scheduler says that all steps of the run are over.

        When a step is canceled or exceeds its time limit, Slurm ends the agents too, so that no report comes.
        """
        steps = self._steps()
        if not self._scheduler or not steps or any(report.slurm_step is None for report in self._unclear()):
            return False
        return self._scheduler.steps_are_over(steps)


def end_killed(run_dir: RunDir, run_id: str) -> None:
    """End the processes of a launch that was killed on this node, on all its nodes, and wait for the end.

    The nodes receive the same order as from the janitor of that launch.
    """
    with contextlib.suppress(OSError):
        order_stop(run_dir, StopOrder(run_id, _AT_ONCE_S, ""))
    deadline = time.monotonic() + _NODES_WITHIN_S
    while time.monotonic() < deadline and (
            any(marked(run_id)) or any(report.state != ENDED for report in read_reports(run_dir, run_id))):
        time.sleep(_POLL_S)
    if remaining := end_marked(run_id):
        warn(f"processes {remaining} of the previous launch cannot be ended")


def _awaited(report: NodeReport) -> str:
    """Return the ranks or processes that a node has not cleared, according to its last report."""
    if report.state == RANKS_ENDED:
        return "the launcher's own processes"
    return rank_ranges(report.ranks) if report.ranks else "its ranks"
