"""Supervision of a run: start, signals, end, and post-mortem."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import hide, secret_values, write_atomic
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics import node_folder
from ezpz_llm.launcher.basics.cleanup import die_with_parent, end_marked, start_janitor
from ezpz_llm.launcher.basics.messages import StopOrder, order_signal, order_stop
from ezpz_llm.launcher.basics.relay import Relay, is_same_file, print_stderr, print_unless_blocked, warn
from ezpz_llm.launcher.basics.variables import RANKS_OWN, TEE_VARIABLE, TORCHS_OWN
from ezpz_llm.launcher.diagnosis.postmortem import bare_postmortem, postmortem_of, tail_text
from ezpz_llm.launcher.jobs.schedulers import scheduler_here, schedulers
from ezpz_llm.launcher.on_nodes.run_facts import Postmortem, RunFacts
from ezpz_llm.launcher.planning.plan import LaunchPlan
from ezpz_llm.launcher.running.run_monitor import RunMonitor, log_errors, warn_of_error
from ezpz_llm.launcher.running.signals import Signals
from ezpz_llm.launcher.running.teardown import Teardown

_KILL_AFTER_S = 5.0
"""Time from SIGTERM to SIGKILL if launch decides to end the run."""
_SIGNALED_KILL_AFTER_S = 10.0
"""Time from SIGTERM to SIGKILL if launch received a signal: ranks may be saving their work."""

_SAVES_AT_SIGTERM = ("ezpz_llm.train",)
_OUTER_RANK_VARIABLES = {*RANKS_OWN, *TORCHS_OWN}
"""Rank variables of an outer rank, or left over in the shell, that are removed from the environment.

mpiexec and srun replace variables of MPI, but the new ranks would read torch's variables as their own.
"""

_CONSOLE_LIMIT_S = 3.0
"""Time limit for the console to accept the remaining output of a run that launch ended."""
_POLL_S = 0.1
_ORPHAN_GRACE_S = 1.0


def run(plan: LaunchPlan, idle_limit_s: float | None, command_limit_s: float | None = None,
        record_end: Callable[[Postmortem], None] = lambda postmortem: None,
        prints_postmortem: Callable[[], bool] = lambda: True,
        start_limit_s: float | None = None, *, reads_stdin: bool = False) -> Postmortem:
    """Run the plan to its end, and leave none of its processes on any reachable node.

    Args:
        idle_limit_s: time limit without a sign of life from a rank; None for no limit.
        command_limit_s: time limit of a command that launch runs before the user's.
        record_end: records the outcome. It is called before launch prints the post-mortem, since the console may
            block.
        prints_postmortem: returns False if launch should not print the post-mortem.
        start_limit_s: time limit for the start of all ranks; None for no limit.
        reads_stdin: the launcher, and thus rank 0, reads this process's standard input. mpiexec reads all of it,
            even if no rank does.

    Raises:
        UserError: the launcher cannot be started.
    """
    signals = Signals()
    with signals.listening():
        janitor = start_janitor(plan.run_id, _ORPHAN_GRACE_S,
                                lambda: order_stop(plan.run_dir, StopOrder(plan.run_id, _ORPHAN_GRACE_S, "")))
        try:
            launcher = _start(plan, None if reads_stdin else subprocess.DEVNULL)
            supervisor = _Supervisor(plan, launcher, signals, idle_limit_s, command_limit_s, start_limit_s)
            outcome = supervisor.wait_for_end(record_end, prints_postmortem)
        finally:
            remaining = end_marked(plan.run_id)
            node_folder.remove(plan.run_id)
            janitor.dismiss()
    if remaining:
        warn(f"could not end processes {', '.join(map(str, remaining))} of this run")
    return outcome


def _start(plan: LaunchPlan, stdin: int | None) -> subprocess.Popen[bytes]:
    removed = _OUTER_RANK_VARIABLES.union(plan.removed,
                                          *(scheduler.CONFLICTING for scheduler in schedulers().values()))
    env = {name: value for name, value in os.environ.items() if name not in removed}
    env |= {name: setting.value for name, setting in plan.env.items()}
    sys.stdout.flush()
    try:
        # In a new session, Ctrl-C in the terminal reaches only launch, which then shuts the run down cleanly.
        return subprocess.Popen(plan.argv, env=env, start_new_session=True, stdin=stdin, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    except OSError as error:
        raise UserError(f"cannot start {plan.argv[0]}: {error.strerror}", where=plan.launcher.source,
                        instead="choose another --launcher") from error


class _Supervisor:
    """Waits for the launcher, ends the run if necessary, and reports the outcome."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], signals: Signals,
                 idle_limit_s: float | None, command_limit_s: float | None, start_limit_s: float | None) -> None:
        self.plan = plan
        self.launcher = launcher
        self.signals = signals
        self.command_limit_s = command_limit_s
        self.started = time.monotonic()
        self.relay = Relay(launcher, plan.run_dir)
        self.facts = RunFacts(
            world_size=len(plan.ranks), hosts=tuple(place.host for place in plan.ranks),
            launcher=plan.launcher.kind, launcher_status=None, ended=float("inf"), ends_at=plan.allocation.ends_at,
            started=time.time(), scheduler=plan.allocation.scheduler, job_id=plan.allocation.job_id)
        self.monitor = RunMonitor(plan, self.facts, idle_limit_s, start_limit_s, self.started)
        self.teardown = Teardown(plan, launcher, self.monitor.life)

    def wait_for_end(self, record_end: Callable[[Postmortem], None],
                     prints_postmortem: Callable[[], bool]) -> Postmortem:
        """Wait for the end of the run, or end it, and report the outcome in files, then on the console."""
        stopped = self._wait()
        failed = ended_well = None
        if stopped is not None:
            self.relay.stop_blocking()
            with log_errors("reading the exit codes of ranks"):
                failed, ended_well = self.monitor.ended()
            signal_count = len(self.signals.to_stop)
            if signal_count:
                print_unless_blocked(("\n" if self.relay.is_within_a_line else "")
                                     + _stop_message(self.signals.to_stop[0], is_saving=self._saves_at_stop()))
            self.teardown.stop(_SIGNALED_KILL_AFTER_S if signal_count else _KILL_AFTER_S,
                               lambda: len(self.signals.to_stop) > signal_count, stopped.kind == "idle",
                               self.signals.to_stop[0].name if signal_count else "")
        ended_at = time.time()
        self.teardown.clear()
        self.relay.read_rest()
        if stopped is not None and stopped.kind == "signal" and (scheduler := scheduler_here(os.environ)):
            # They come from the job's output file, which may have the ranks' lines too.
            self.relay.append_to_log("".join(f"{line}\n" for line in scheduler.cancellations(os.environ)
                                             if not self._has_printed(line)))
        facts = replace(self.facts, launcher_status=self.launcher.returncode, ended=ended_at, stopped=stopped,
                        failed_before_stop=failed, ended_before_stop=ended_well)
        try:
            settings = {name: setting.value for name, setting in self.plan.env.items()}
            ended = postmortem_of(self.plan.run_dir, facts, settings)
        except Exception as error:
            warn_of_error("writing the post-mortem", error)
            ended = bare_postmortem(self.plan.run_dir, self.plan.run_id, facts)
        if ended.text:
            with contextlib.suppress(OSError):
                # UTF-8 in any locale; names may have bytes that are not UTF-8.
                text = hide(ended.text, secret_values(os.environ))
                write_atomic(self.plan.run_dir.post_mortem, f"{text}\n".encode(errors="backslashreplace"))
        record_end(ended)
        if self._drain_console(stopped):
            self.monitor.warn_of_mpi()
            if ended.text and prints_postmortem():
                print_stderr(("\n" if self.relay.is_within_a_line else "")
                             + (ended.brief if self._has_shown(ended.lines_of) else ended.text))
        return ended

    def _saves_at_stop(self) -> bool:
        """Return True for a training run that has reached its first step: on SIGTERM, it saves a checkpoint."""
        return self.plan.target.module in _SAVES_AT_SIGTERM and self.monitor.has_stepped()

    def _has_printed(self, line: str) -> bool:
        """Return True if a rank has printed this line."""
        return any(line in tail_text(log) for log in self.plan.run_dir.rank_log(0).parent.glob("rank*.log"))

    def _has_shown(self, rank: int | None) -> bool:
        """Return True if the console that shows launch's messages has also shown the output of `rank`."""
        tee = self.plan.env[TEE_VARIABLE].value
        return is_same_file(1, 2) and (tee == "all" or (tee == "0" and rank == 0))

    def _drain_console(self, stopped: Stop | None) -> bool:
        """Wait until the console has all output, which a slow reader (`| less`) can delay.

        Return False if a signal or, for a stopped run, the time limit ended the wait.
        """
        signals, deadline = len(self.signals.to_stop), time.monotonic() + _CONSOLE_LIMIT_S
        return self.relay.wait_until_shown(lambda: len(self.signals.to_stop) > signals
                                           or (stopped is not None and time.monotonic() > deadline))

    def _wait(self) -> Stop | None:
        """Wait until the launcher ends (return None) or must be stopped (return the reason)."""
        while self.launcher.poll() is None:
            now = time.monotonic()
            if self.signals.to_stop:
                return _by_signal(self.signals.to_stop[0])
            while self.signals.to_forward:
                with contextlib.suppress(OSError):
                    order_signal(self.plan.run_dir, self.plan.run_id, self.signals.to_forward.pop(0))
            if (stop := self.monitor.stop_reason(now)) is not None:
                return stop
            if self.command_limit_s is not None and now - self.started > self.command_limit_s:
                return Stop("idle", f"the command was not ready after {self.command_limit_s:g} s; launch ended it")
            time.sleep(_POLL_S)
        return _by_signal(self.signals.to_stop[0]) if self.signals.to_stop else None


_USUAL_CAUSES = {signal.SIGINT: "Ctrl-C",
                 signal.SIGHUP: "the terminal was closed, or the ssh connection was lost",
                 signal.SIGTERM: "the job was canceled or its time expired, or timeout or kill sent it"}


def _by_signal(number: signal.Signals) -> Stop:
    return Stop("signal", f"launch received {number.name} ({_USUAL_CAUSES[number]}) and ended the run", number.name)


def _stop_message(number: signal.Signals, *, is_saving: bool) -> str:
    """Return the message printed when a signal arrives."""
    action = "saving and stopping after this step" if is_saving else "stopping all ranks with SIGTERM"
    again = "; press ^C again to stop now" if number == signal.SIGINT else ""
    return f"launch: {number.name}: {action} (within {_SIGNALED_KILL_AFTER_S:.0f} s){again}"
