"""Monitoring of a run: reports of its ranks and nodes, and reasons to end it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from ezpz_llm.core.base import count_noun, shorten_value
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.basics.messages import take_stacks
from ezpz_llm.launcher.basics.relay import print_stderr, warn
from ezpz_llm.launcher.diagnosis.differences import describe_blocking_rank
from ezpz_llm.launcher.diagnosis.liveness import HeartbeatMonitor, RankLife, StartMonitor, find_silent_ranks
from ezpz_llm.launcher.diagnosis.start_progress import StartProgress
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts, read_failures
from ezpz_llm.launcher.planning.plan import LaunchPlan

_PEER_GRACE_S = 3.0
"""Time that the peers of a failed rank keep running, so that they can report their own errors."""
_REPORT_POLL_S = 5.0
_NODE_SILENT_S = 60.0
_NOTE_AFTER_S = 30.0
_STACKS_LIMIT_S = 15.0
_MAX_STACKS = 8
_WARNED_ACTIONS: set[str] = set()


class RunMonitor:
    """Monitor of the ranks and nodes of a run.

    Args:
        facts: facts about the run before its end.
        idle_limit_s: time limit without a sign of life from a rank; None for no limit.
        start_limit_s: time limit for the start of all ranks; None for no limit.
        started: monotonic time at which the launcher was started.
    """

    def __init__(self, plan: LaunchPlan, facts: RunFacts, idle_limit_s: float | None, start_limit_s: float | None,
                 started: float) -> None:
        self.life = HeartbeatMonitor(plan.run_dir, plan.run_id, {place.rank: place.host for place in plan.ranks},
                                     started)
        self._plan = plan
        self._idle_limit_s = idle_limit_s
        self._start_monitor = StartMonitor(facts, plan.run_dir, start_limit_s)
        self._start_progress = StartProgress()
        self._reports_at = started
        self._failed_at: float | None = None
        self._first_ended_at: float | None = None
        self._has_noted = False
        self._warned: set[str] = set()

    def stop_reason(self, now: float) -> Stop | None:
        """Return the reason to end the run, or None. Also prints warnings and notes."""
        with log_errors("reading the records of ranks"):
            if self._failed_at is None and self._has_failed():
                self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > _PEER_GRACE_S:
            return Stop("rank", "a rank failed")
        if self._failed_at is None and (stop := self._check_start(now)) is not None:
            return stop
        if now >= self._reports_at:
            self._reports_at = now + self._report_poll_s()
            with log_errors("reading the reports of nodes"):
                return self._check_reports(now)
        return None

    def ended(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the ranks that have failed, and those that have ended with code 0, by the latest reports."""
        self.life.look(time.monotonic())
        codes = self._codes()
        failed = {failure.rank for failure in read_failures(self._plan.run_dir, self._plan.run_id)}
        return (frozenset(failed | {rank for rank, code in codes.items() if code}),
                frozenset(rank for rank, code in codes.items() if code == 0))

    def has_stepped(self) -> bool:
        """Return True if a rank has reached its first training step."""
        return any(entry.step is not None for report in self.life.nodes for entry in report.ranks.values())

    def _has_failed(self) -> bool:
        """Return True if a record or a node reports a failed rank; the report may arrive before the record."""
        return bool(read_failures(self._plan.run_dir, self._plan.run_id)) or any(
            entry.ended for report in self.life.nodes for entry in report.ranks.values())

    def _check_start(self, now: float) -> Stop | None:
        waited_s = self.life.waited_s(now)
        stop = self._start_monitor.stop_reason(self.life.missing, waited_s)
        if stop is not None:
            # Read the reports again first: the last ones may be some seconds old.
            self.life.look(now)
            stop = self._start_monitor.stop_reason(self.life.missing, waited_s)
        return stop

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        return {rank: entry.ended for report in self.life.nodes for rank, entry in report.ranks.items()
                if entry.ended is not None}

    def _report_poll_s(self) -> float:
        interval_s = _REPORT_POLL_S if self._idle_limit_s is None else min(1.0, self._idle_limit_s / 4)
        return max(interval_s, self.life.interval_s / 2)

    def _check_reports(self, now: float) -> Stop | None:
        self.life.look(now)
        waited_s = self.life.waited_s(now)
        if (message := self._start_monitor.progress_message(self.life.missing, waited_s)) is not None:
            warn(message)
        self._warn_of_nodes(now)
        self._note_ended_ranks(now)
        ranks = self.life.ranks(now)
        reported = {rank for report in self.life.nodes for rank in report.ranks}
        known = [life for life in ranks if life.rank in reported]  # a node without an agent reports nothing
        if not self.life.missing and self._trains(known) and (
                message := self._start_progress.message(known, waited_s)) is not None:
            print_stderr(f"launch: {message}")
        for life in ranks:
            if life.state == "T" and life.idle_s > _NOTE_AFTER_S:
                self._warn_once(f"stopped {life.rank}", str(life))
        if self._idle_limit_s is None:
            return None
        limit_s = self.life.limit_s(self._idle_limit_s)
        silent = find_silent_ranks(ranks, limit_s)
        if not silent:
            return None
        cause = describe_blocking_rank(silent, ranks, self._report_silence(silent, ranks, limit_s))
        return Stop("idle", f"no sign of life for {limit_s:g} s: {cause}; launch ended the run",
                    ranks=tuple(sorted(life.rank for life in silent)))

    def _trains(self, ranks: list[RankLife]) -> bool:
        """Return True for the trainer, and for scripts that report a phase. Other commands have no steps."""
        module = self._plan.target.module
        return module == "ezpz_llm.train" or (module is None and any(life.phase is not None for life in ranks))

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
        self.warn_of_mpi()

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text)

    def warn_of_mpi(self) -> None:
        """Warn once about MPI ranks that are not connected; commands of this package do not use MPI."""
        mpi_warning = next((report.mpi for report in self.life.nodes if report.mpi is not None), None)
        if mpi_warning is not None and self._plan.target.module is None:
            self._warn_once("mpi", mpi_warning)

    def _note_ended_ranks(self, now: float) -> None:
        """Print a note if some ranks ended 30 s ago and others, which may be waiting for them, still run."""
        ended = sorted(self._codes())
        if not ended or len(ended) == len(self._plan.ranks):
            return
        self._first_ended_at = self._first_ended_at or now
        if not self._has_noted and now - self._first_ended_at >= _NOTE_AFTER_S:
            self._has_noted = True
            running = len(self._plan.ranks) - len(ended)
            print_stderr(f"launch: {rank_ranges(ended)} ended with code 0 more than {_NOTE_AFTER_S:.0f} s ago; "
                         f"{running} still run{'s' if running == 1 else ''} ("
                         f"{to_typable(f'ezpz-llm why {self._plan.run_dir.path}')} shows what they do)")

    def _report_silence(self, silent: list[RankLife], ranks: list[RankLife], limit_s: float) -> dict[int, Path]:
        """Dump the stacks of silent ranks and of one active rank, and print and return the paths of the files."""
        silent_ranks = {life.rank for life in silent}
        active = [life for life in ranks if life.rank not in silent_ranks and life.quiet_s < limit_s][:1]
        dumped_ranks = [life.rank for life in (*silent[:_MAX_STACKS], *active) if not life.node_is_silent]
        stacks: dict[int, Path] = {}
        with contextlib.suppress(OSError):
            stacks = take_stacks(self._plan.run_dir, self._plan.run_id, dumped_ranks,
                                 _STACKS_LIMIT_S + self.life.interval_s,
                                 len({place.host for place in self._plan.ranks}))
        lines = [f"launch: no sign of life for {limit_s:g} s:",
                 *(f"  {life}; {_stack_text(life, stacks)}" for life in silent[:_MAX_STACKS])]
        if len(silent) > _MAX_STACKS:
            lines.append(f"  and {count_noun(len(silent) - _MAX_STACKS, 'more rank')}")
        lines += [f"  for comparison, {life}; {_stack_text(life, stacks)}" for life in active]
        print_stderr("\n".join(lines))
        return stacks


@contextlib.contextmanager
def log_errors(action: str) -> Iterator[None]:
    """Continue after any error in the block; print the first error of each `action`.

    User programs may write anything into the run directory. launch must still watch the run, end it, and return its
    exit code.
    """
    try:
        yield
    except Exception as error:
        warn_of_error(action, error)


def warn_of_error(action: str, error: Exception) -> None:
    """Print a warning about the first error of each `action`."""
    if action not in _WARNED_ACTIONS:
        _WARNED_ACTIONS.add(action)
        warn(f"error while {action}: {type(error).__name__}: {shorten_value(str(error))}")


def _stack_text(life: RankLife, stacks: dict[int, Path]) -> str:
    return f"its stack: {stacks[life.rank]}" if life.rank in stacks else "its stack is not available"
