"""Teardown of a run on every node, even if its launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.cleanup import end_marked
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.basics.messages import (
    ENDED,
    RANKS_ENDED,
    NodeReport,
    StopOrder,
    control_interval_s,
    order_stop,
    read_reports,
)
from ezpz_llm.launcher.basics.processes import marked_processes
from ezpz_llm.launcher.basics.relay import warn
from ezpz_llm.launcher.diagnosis.liveness import HeartbeatMonitor
from ezpz_llm.launcher.jobs.schedulers import scheduler_here
from ezpz_llm.launcher.planning.plan import LaunchPlan

_POLL_S = 0.1
_SHORT_GRACE_S = 1.0
"""Grace period once the launcher has exited."""
_LAUNCHER_EXIT_S = 2.0
"""Time for the launcher to exit after its ranks, and again after SIGTERM."""
_NODE_REPORTS_S = 12.0
"""Time for nodes to report that no process of the run is left, in addition to their polling interval."""
_QUERY_SCHEDULER_AFTER_S = 2.0
_AGENT_START_S = 3.0
"""Time for the agents of ranks that have just started to report."""


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
            is_hang: True if the ranks are to print their stacks.
            received: see `StopOrder`.
        """
        self._is_hang, self._received = is_hang, received
        self._order(grace_s)
        deadline = time.monotonic() + _AGENT_START_S
        while not (have_agents := self._have_all_agents()) and time.monotonic() < deadline and not is_urgent():
            time.sleep(_POLL_S)
        if not have_agents:
            # Ranks that have no agent can be ended only by the launcher.
            self._signal(signal.SIGTERM)
        self._wait(grace_s + self._order_s + _LAUNCHER_EXIT_S, is_urgent)
        if self._launcher.poll() is None:
            if is_urgent():
                self._order(0.0)
            self._signal(signal.SIGTERM)
            self._wait(_LAUNCHER_EXIT_S, lambda: False)
        if self._launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            # The killed srun can no longer end its step, so Slurm would wait for the ranks.
            self._cancel_step()

    def clear(self) -> None:
        """Wait until every node or the scheduler reports that no process of the run is left; warn if none does.

        The launcher must have ended.
        """
        if self._unfinished():
            self._await_nodes()
        for report in self._life.nodes:
            if report.left:
                warn(f"could not end processes {', '.join(map(str, report.left))} on {report.host}")

    def _await_nodes(self) -> None:
        self._order(_SHORT_GRACE_S)
        began = time.monotonic()
        limit_s = _NODE_REPORTS_S + self._order_s + self._life.interval_s
        query_at = began + _QUERY_SCHEDULER_AFTER_S
        while (unfinished := self._unfinished()) and time.monotonic() - began < limit_s:
            if time.monotonic() > query_at:
                if self._steps_have_ended():
                    break
                self._cancel_step()
                query_at = time.monotonic() + limit_s / 4
            time.sleep(_POLL_S)
        for report in [] if self._steps_have_ended() else unfinished:
            warn(f"{report.host} has not reported {_remaining(report)} as ended: the node may be down, or"
                 " processes may remain there")

    def _unfinished(self) -> list[NodeReport]:
        self._life.look(time.monotonic())
        return [report for report in self._life.nodes if report.state != ENDED]

    def _have_all_agents(self) -> bool:
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
        """Return the scheduler's steps in which the agents ran, except the step in which launch itself runs."""
        own_step = self._scheduler.own_step(os.environ) if self._scheduler else None
        return sorted({step for node in self._life.nodes if (step := node.slurm_step) and step != own_step})

    def _cancel_step(self) -> None:
        if self._scheduler and (steps := self._steps()):
            self._scheduler.kill_steps(steps)

    def _steps_have_ended(self) -> bool:
        """Return True if the scheduler says that all steps of the run have ended.

        When a step is canceled or exceeds its time limit, Slurm ends the agents too, so that no report comes.
        """
        steps = self._steps()
        if not self._scheduler or not steps or any(report.slurm_step is None for report in self._unfinished()):
            return False
        return self._scheduler.steps_are_over(steps)


def end_killed_run(run_dir: RunDir, run_id: str) -> None:
    """End all processes of a run whose launch was killed on this node, and wait until they have ended.

    Its nodes receive the same order as from the janitor of that launch.
    """
    with contextlib.suppress(OSError):
        order_stop(run_dir, StopOrder(run_id, _SHORT_GRACE_S, ""))
    deadline = time.monotonic() + _NODE_REPORTS_S
    while time.monotonic() < deadline and (
            any(marked_processes(run_id)) or any(report.state != ENDED for report in read_reports(run_dir,
                                                                                                  run_id))):
        time.sleep(_POLL_S)
    if remaining := end_marked(run_id):
        warn(f"could not end processes {', '.join(map(str, remaining))} of the previous launch")


def _remaining(report: NodeReport) -> str:
    """Return the ranks or processes that still ran on a node at its last report, as text."""
    if report.state == RANKS_ENDED:
        return "the launcher's own processes"
    return rank_ranges(report.ranks) if report.ranks else "its ranks"
