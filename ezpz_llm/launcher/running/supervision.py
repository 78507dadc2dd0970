"""Supervision of a run: start, monitoring, signal forwarding, end, and post-mortem."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ezpz_llm.core.base import UserError, count_noun, shorten_value
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir import hide, secret_values, write_atomic
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics import node_folder
from ezpz_llm.launcher.basics.cleanup import die_with_parent, end_marked, start_janitor
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.basics.messages import StopOrder, order_signal, order_stop, take_stacks
from ezpz_llm.launcher.basics.relay import Relay, is_same_file, print_stderr, print_unless_blocked, warn
from ezpz_llm.launcher.basics.variables import RANKS_OWN, TEE_VARIABLE, TORCHS_OWN
from ezpz_llm.launcher.diagnosis.differences import describe_blocking_rank
from ezpz_llm.launcher.diagnosis.liveness import HeartbeatMonitor, RankLife, StartMonitor, find_silent_ranks
from ezpz_llm.launcher.diagnosis.postmortem import bare_postmortem, postmortem_of, tail_text
from ezpz_llm.launcher.jobs.schedulers import scheduler_here, schedulers
from ezpz_llm.launcher.on_nodes.run_facts import Postmortem, RunFacts, read_failures
from ezpz_llm.launcher.planning.plan import LaunchPlan
from ezpz_llm.launcher.running.signals import Signals
from ezpz_llm.launcher.running.teardown import Teardown

_PEER_GRACE_S = 3.0
"""Time that the peers of a failed rank keep running, so that they can report their own errors."""
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
_REPORT_POLL_S = 5.0
_ORPHAN_GRACE_S = 1.0
_NODE_SILENT_S = 60.0
_NOTE_AFTER_S = 30.0
_STACKS_LIMIT_S = 15.0
_MAX_STACKS = 8
_WARNED_ACTIONS: set[str] = set()


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
    """Watches the launcher and its ranks, ends the run if necessary, and reports the outcome."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], signals: Signals,
                 idle_limit_s: float | None, command_limit_s: float | None, start_limit_s: float | None) -> None:
        self.plan = plan
        self.launcher = launcher
        self.signals = signals
        self.idle_limit_s = idle_limit_s
        self.command_limit_s = command_limit_s
        self.started = time.monotonic()
        self.relay = Relay(launcher, plan.run_dir)
        hosts = {place.rank: place.host for place in plan.ranks}
        self.life = HeartbeatMonitor(plan.run_dir, plan.run_id, hosts, self.started)
        self.facts = RunFacts(
            world_size=len(plan.ranks), hosts=tuple(place.host for place in plan.ranks),
            launcher=plan.launcher.kind, launcher_status=None, ended=float("inf"), ends_at=plan.allocation.ends_at,
            started=time.time(), scheduler=plan.allocation.scheduler, job_id=plan.allocation.job_id)
        self.start_monitor = StartMonitor(self.facts, plan.run_dir, start_limit_s)
        self.teardown = Teardown(plan, launcher, self.life)
        self.warned: set[str] = set()
        self.first_ended_at: float | None = None
        self.has_noted = False

    def wait_for_end(self, record_end: Callable[[Postmortem], None],
                     prints_postmortem: Callable[[], bool]) -> Postmortem:
        """Wait for the end of the run, or end it, and report the outcome in files, then on the console."""
        stopped = self._wait()
        failed = ended_well = None
        if stopped is not None:
            self.relay.stop_blocking()
            with _log_errors("reading the exit codes of ranks"):
                self.life.look(time.monotonic())
                codes = self._codes()
                failed = frozenset(failure.rank for failure in read_failures(self.plan.run_dir, self.plan.run_id))
                failed |= {rank for rank, code in codes.items() if code}
                ended_well = frozenset(rank for rank, code in codes.items() if code == 0)
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
            _warn_of_error("writing the post-mortem", error)
            ended = bare_postmortem(self.plan.run_dir, self.plan.run_id, facts)
        if ended.text:
            with contextlib.suppress(OSError):
                # UTF-8 in any locale; names may have bytes that are not UTF-8.
                text = hide(ended.text, secret_values(os.environ))
                write_atomic(self.plan.run_dir.post_mortem, f"{text}\n".encode(errors="backslashreplace"))
        record_end(ended)
        if self._drain_console(stopped):
            self._warn_of_mpi()
            if ended.text and prints_postmortem():
                print_stderr(("\n" if self.relay.is_within_a_line else "")
                             + (ended.brief if self._has_shown(ended.lines_of) else ended.text))
        return ended

    def _saves_at_stop(self) -> bool:
        """Return True for a training run that has reached its first step: on SIGTERM, it saves a checkpoint."""
        return self.plan.target.module in _SAVES_AT_SIGTERM and any(
            entry.step is not None for report in self.life.nodes for entry in report.ranks.values())

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
        failed_at: float | None = None
        reports_at = self.started
        while self.launcher.poll() is None:
            now = time.monotonic()
            if self.signals.to_stop:
                return _by_signal(self.signals.to_stop[0])
            while self.signals.to_forward:
                with contextlib.suppress(OSError):
                    order_signal(self.plan.run_dir, self.plan.run_id, self.signals.to_forward.pop(0))
            with _log_errors("reading the records of ranks"):
                if failed_at is None and self._has_failed():
                    failed_at = now
            if failed_at is not None and now - failed_at > _PEER_GRACE_S:
                return Stop("rank", "a rank failed")
            if failed_at is None and (stop := self._check_start(now)) is not None:
                return stop
            if self.command_limit_s is not None and now - self.started > self.command_limit_s:
                return Stop("idle", f"the command was not ready after {self.command_limit_s:g} s; launch ended it")
            if now >= reports_at:
                reports_at = now + self._report_poll_s()
                with _log_errors("reading the reports of nodes"):
                    if (silence := self._check_reports(now)) is not None:
                        return silence
            time.sleep(_POLL_S)
        return _by_signal(self.signals.to_stop[0]) if self.signals.to_stop else None

    def _has_failed(self) -> bool:
        """Return True if a record or a node reports a failed rank; the report may arrive before the record."""
        return bool(read_failures(self.plan.run_dir, self.plan.run_id)) or any(
            entry.ended for report in self.life.nodes for entry in report.ranks.values())

    def _check_start(self, now: float) -> Stop | None:
        waited_s = self.life.waited_s(now)
        stop = self.start_monitor.stop_reason(self.life.missing, waited_s)
        if stop is not None:
            # Read the reports again first: the last ones may be some seconds old.
            self.life.look(now)
            stop = self.start_monitor.stop_reason(self.life.missing, waited_s)
        return stop

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        return {rank: entry.ended for report in self.life.nodes for rank, entry in report.ranks.items()
                if entry.ended is not None}

    def _report_poll_s(self) -> float:
        interval_s = _REPORT_POLL_S if self.idle_limit_s is None else min(1.0, self.idle_limit_s / 4)
        return max(interval_s, self.life.interval_s / 2)

    def _check_reports(self, now: float) -> Stop | None:
        self.life.look(now)
        if (message := self.start_monitor.progress_message(self.life.missing, self.life.waited_s(now))) is not None:
            warn(message)
        self._warn_of_nodes(now)
        self._note_ended_ranks(now)
        ranks = self.life.ranks(now)
        for life in ranks:
            if life.state == "T" and life.idle_s > _NOTE_AFTER_S:
                self._warn_once(f"stopped {life.rank}", str(life))
        if self.idle_limit_s is None:
            return None
        limit_s = self.life.limit_s(self.idle_limit_s)
        silent = find_silent_ranks(ranks, limit_s)
        if not silent:
            return None
        cause = describe_blocking_rank(silent, ranks, self._report_silence(silent, ranks, limit_s))
        return Stop("idle", f"no sign of life for {limit_s:g} s: {cause}; launch ended the run",
                    ranks=tuple(sorted(life.rank for life in silent)))

    def _warn_of_nodes(self, now: float) -> None:
        for report, age in self.life.silent_nodes(now, _NODE_SILENT_S):
            self._warn_once(report.host,
                            f"{report.host} has not reported for {age:.0f} s, unlike other nodes: it may be down")
        for report in self.life.nodes:
            if report.error is not None:
                self._warn_once(f"{report.host} {report.error}",
                                f"error of the agent on {report.host}: {report.error.strip().splitlines()[-1]}")
            for name in report.builds:
                self._warn_once(name, f"ranks on {report.host} compile {name} on its first use, which can take"
                                      " several minutes")
        self._warn_of_mpi()

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self.warned:
            self.warned.add(key)
            warn(text)

    def _warn_of_mpi(self) -> None:
        """Warn once about MPI ranks that are not connected; commands of this package do not use MPI."""
        mpi_warning = next((report.mpi for report in self.life.nodes if report.mpi is not None), None)
        if mpi_warning is not None and self.plan.target.module is None:
            self._warn_once("mpi", mpi_warning)

    def _note_ended_ranks(self, now: float) -> None:
        """Print a note if some ranks ended 30 s ago and others, which may be waiting for them, still run."""
        ended = sorted(self._codes())
        if not ended or len(ended) == len(self.plan.ranks):
            return
        self.first_ended_at = self.first_ended_at or now
        if not self.has_noted and now - self.first_ended_at >= _NOTE_AFTER_S:
            self.has_noted = True
            running = len(self.plan.ranks) - len(ended)
            print_stderr(f"launch: {rank_ranges(ended)} ended with code 0 more than {_NOTE_AFTER_S:.0f} s ago; "
                         f"{running} still run{'s' if running == 1 else ''} ("
                         f"{to_typable(f'ezpz-llm why {self.plan.run_dir.path}')} shows what they do)")

    def _report_silence(self, silent: list[RankLife], ranks: list[RankLife], limit_s: float) -> dict[int, Path]:
        """Dump the stacks of silent ranks and of one active rank, and print and return the paths of the files."""
        silent_ranks = {life.rank for life in silent}
        active = [life for life in ranks if life.rank not in silent_ranks and life.quiet_s < limit_s][:1]
        dumped_ranks = [life.rank for life in (*silent[:_MAX_STACKS], *active) if not life.node_is_silent]
        stacks: dict[int, Path] = {}
        with contextlib.suppress(OSError):
            stacks = take_stacks(self.plan.run_dir, self.plan.run_id, dumped_ranks,
                                 _STACKS_LIMIT_S + self.life.interval_s)
        lines = [f"launch: no sign of life for {limit_s:g} s:",
                 *(f"  {life}; {_stack_text(life, stacks)}" for life in silent[:_MAX_STACKS])]
        if len(silent) > _MAX_STACKS:
            lines.append(f"  and {count_noun(len(silent) - _MAX_STACKS, 'more rank')}")
        lines += [f"  for comparison, {life}; {_stack_text(life, stacks)}" for life in active]
        print_stderr("\n".join(lines))
        return stacks


@contextlib.contextmanager
def _log_errors(action: str) -> Iterator[None]:
    """Continue after any error in the block; print the first error of each `action`.

    User programs may write anything into the run directory. launch must still watch the run, end it, and return its
    exit code.
    """
    try:
        yield
    except Exception as error:
        _warn_of_error(action, error)


def _warn_of_error(action: str, error: Exception) -> None:
    if action not in _WARNED_ACTIONS:
        _WARNED_ACTIONS.add(action)
        warn(f"error while {action}: {type(error).__name__}: {shorten_value(str(error))}")


def _stack_text(life: RankLife, stacks: dict[int, Path]) -> str:
    return f"its stack: {stacks[life.rank]}" if life.rank in stacks else "its stack is not available"


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
