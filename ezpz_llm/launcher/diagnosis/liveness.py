"""Liveness of a run: heartbeats that node agents report, silent ranks, and ranks that have not started."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import group_by_key, system_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import RunRecord
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics import log_kinds
from ezpz_llm.launcher.basics.hostlist import fold_numbers, fold_rank_places, rank_ranges
from ezpz_llm.launcher.basics.log_kinds import NOT_STARTED, WRONG_WORLD
from ezpz_llm.launcher.basics.messages import ENDED, KEEPALIVE_S, RANKS_ENDED, NodeReport, RankReport, read_reports
from ezpz_llm.launcher.basics.processes import marked_processes
from ezpz_llm.launcher.basics.variables import PATIENT, RENDEZVOUS, RUN_ID_VARIABLE
from ezpz_llm.launcher.diagnosis.log_patterns import LogMatch, read_messages
from ezpz_llm.launcher.jobs.owner import is_launch_running
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_START_S = 60.0
"""Time added to the idle limit until the first report of a rank."""

_FILE_NAME = re.compile(r"(?P<kind>rank|node)(?P<rank>\d+)(?:\.json)?")
UNUSUAL_STATES = {"T": "stopped by a signal (state T; kill -CONT continues it)",
                  "D": "waits for a device or a file system (state D)"}
"""Kernel states of a process that are unusual for a rank."""
_POLL_WITHIN_S = 10.0
"""Longest normal time between two polls, beyond the interval of the reports; the rest is time without polls."""


@dataclass(frozen=True)
class RankLife:
    """Time since the last signs of life of a rank.

    Attributes:
        silent_s: seconds without a heartbeat; None if the rank has never sent one.
        idle_s: seconds without CPU time or output.
        node_s: seconds without a report from its node.
        node_limit_s: `node_s` above which the node is considered silent.
        state: the kernel's letter for the state of its main process.
    """

    rank: int
    host: str
    phase: str | None
    step: int | None
    silent_s: float | None
    idle_s: float
    node_s: float
    node_limit_s: float
    state: str | None = None

    @property
    def quiet_s(self) -> float:
        """Seconds since the last heartbeat; without heartbeats, since the last CPU time or output."""
        return self.idle_s if self.silent_s is None else self.silent_s

    @property
    def node_is_silent(self) -> bool:
        """True if the node itself has stopped reporting."""
        return self.node_s > self.node_limit_s

    def __str__(self) -> str:
        activity = self.phase or "before its first heartbeat"
        step = "" if self.step is None else f", step {self.step}"
        node = f"; its node has not reported for {self.node_s:.0f} s" if self.node_is_silent else ""
        state = f"; {UNUSUAL_STATES[self.state]}" if self.state in UNUSUAL_STATES else ""
        return f"rank {self.rank} on {self.host}: {activity}{step}, silent for {self.quiet_s:.0f} s{state}{node}"


def find_silent_ranks(ranks: Sequence[RankLife], limit_s: float) -> list[RankLife]:
    """Return the silent ranks, most likely cause first; if there are any, the run must end.

    If no rank sends heartbeats, one active rank keeps the run alive. Otherwise each rank is judged by itself, but
    may wait for a rank at the same or an earlier step that is active in a phase without heartbeats.
    """
    with_heartbeats = [rank for rank in ranks if rank.silent_s is not None]
    if not with_heartbeats:
        silent = list(ranks) if all(rank.idle_s > limit_s for rank in ranks) else []
        return sorted(silent, key=lambda rank: _cause_order(rank.state))
    busy_steps = [-1 if rank.step is None else rank.step for rank in with_heartbeats
                  if rank.phase in PATIENT and min(rank.silent_s or 0.0, rank.idle_s) <= limit_s]
    earliest = min(busy_steps, default=None)
    is_awaited = any(rank.silent_s is None and rank.idle_s <= limit_s for rank in ranks)
    silent = [rank for rank in ranks if rank.quiet_s > limit_s and not (
        (earliest is not None and (rank.step is None or earliest <= rank.step))
        or (is_awaited and rank.phase == RENDEZVOUS))]
    return sorted(silent, key=lambda rank: (not rank.node_is_silent, _cause_order(rank.state),
                                            -1 if rank.step is None else rank.step, -rank.quiet_s))


def _cause_order(state: str | None) -> int:
    """Return a sort key: a stopped process is the most likely cause, then one that waits for a device or disk."""
    return {"T": 0, "D": 1}.get(state or "", 2)


class HeartbeatMonitor:
    """Monitor of the nodes' reports.

    Ages in a report are differences on the node's clock, and the age of a report is a difference on launch's clock,
    so clock skew between nodes does not matter.
    """

    def __init__(self, run_dir: RunDir, run_id: str, hosts: Mapping[int, str], started: float) -> None:
        """Args:
            hosts: node of each expected rank.
            started: monotonic time at which the launcher was started.
        """
        self._run_dir = run_dir
        self._run_id = run_id
        self._hosts = hosts
        self._started = self._polled_at = started
        self._reports: dict[int, tuple[NodeReport, float]] = {}
        self.missing = dict(hosts)
        """Ranks that have not started yet, with their nodes."""

    def look(self, now: float) -> None:
        """Read the new reports.

        Time without polls (a file system that hung, a suspended laptop) does not count as silence.
        """
        blind_s = now - self._polled_at - _POLL_WITHIN_S - self.interval_s
        self._polled_at = now
        if blind_s > 0:
            self._started += blind_s
            self._reports = {node: (report, received_at + blind_s)
                             for node, (report, received_at) in self._reports.items()}
        for report in read_reports(self._run_dir, self._run_id):
            previous = self._reports.get(report.first_rank)
            if previous is None or previous[0] != report:
                self._reports[report.first_rank] = (report, now)
                for rank in report.ranks:
                    self.missing.pop(rank, None)
                if report.error is not None:
                    self._expect_no_reports(report.first_rank)
        if self.missing:
            self._find_started_ranks()

    def _find_started_ranks(self) -> None:
        """Find ranks that have started on nodes that cannot report.

        Without a directory for an agent, the shims create files themselves; on a full disk, a report is empty.
        """
        with contextlib.suppress(OSError), os.scandir(self._run_dir.rank_heartbeat(0).parent) as entries:
            for entry in entries:
                if match := _FILE_NAME.fullmatch(entry.name):
                    rank = int(match["rank"])
                    if match["kind"] == "rank":
                        self.missing.pop(rank, None)
                    elif rank not in self._reports and entry.stat().st_size == 0:
                        self._expect_no_reports(rank)

    def _expect_no_reports(self, first_rank: int) -> None:
        host = self._hosts.get(first_rank)
        self.missing = {rank: node for rank, node in self.missing.items() if node != host}

    def waited_s(self, now: float) -> float:
        """Return the seconds since the launcher was started, except for time without polls."""
        return now - self._started

    @property
    def nodes(self) -> list[NodeReport]:
        """The latest report of each node."""
        return [report for report, _ in self._reports.values()]

    @property
    def interval_s(self) -> float:
        """Longest report interval of any node in seconds."""
        return max((report.interval_s for report in self.nodes), default=1.0)

    def limit_s(self, wanted_s: float) -> float:
        """Return the idle limit, at least three report intervals if nodes report less often than every second."""
        return wanted_s if self.interval_s <= 1.0 else max(wanted_s, 3 * self.interval_s)

    def ranks(self, now: float) -> list[RankLife]:
        """Return the liveness of each rank that has not ended.

        The idle time of a rank that was never reported begins _START_S after the launcher was started.
        """
        node_limit_s = 3 * KEEPALIVE_S * self.interval_s
        lives = {}
        for report, received_at in self._reports.values():
            for rank, entry in report.ranks.items():
                has_ended = entry.ended is not None or report.state in (RANKS_ENDED, ENDED)
                lives[rank] = None if has_ended else _life(rank, entry, report, now - received_at, node_limit_s)
        for rank, host in self._hosts.items():
            if rank not in lives:
                waited = now - self._started - _START_S
                lives[rank] = RankLife(rank, host, None, None, None, waited, waited, node_limit_s)
        return [life for life in lives.values() if life is not None]

    def silent_nodes(self, now: float, for_s: float) -> list[tuple[NodeReport, float]]:
        """Return the nodes that have not reported for `for_s`, with the age of their reports.

        The list is empty if no node reports: then the cause is not a single node.
        """
        limit_s = max(for_s, 3 * KEEPALIVE_S * self.interval_s)
        ages = [(report, now - received_at) for report, received_at in self._reports.values()
                if report.state not in (ENDED, RANKS_ENDED)]
        if all(age > limit_s for _, age in ages):
            return []
        return [(report, age) for report, age in ages if age > limit_s]


_DEAD_AFTER = 3
"""Keep-alive intervals without a report after which an agent is considered dead."""


@dataclass(frozen=True)
class Live:
    """State of a running job.

    Attributes:
        silent: silent ranks, most likely cause first.
        ended: exit codes of the ranks that have ended.
        missing: ranks that have not reported yet.
    """

    run_id: str
    ranks: tuple[RankLife, ...]
    silent: tuple[RankLife, ...]
    ended: Mapping[int, int]
    missing: tuple[int, ...]


def read_live_state(run_dir: RunDir, record: RunRecord, silent_after_s: float) -> Live | None:
    """Return the state of a run, or None if it has ended or its record has no run id or world size.

    It has ended if its record says so, or if no agent has reported recently, this node has no process of the run,
    and launch is not running.

    A run whose ranks have all ended is considered running until launch has recorded its end.
    """
    launch = record.launch
    run_id = launch and launch.env and launch.env.get(RUN_ID_VARIABLE)
    if not launch or not run_id or launch.world_size is None:
        return None
    reports = read_reports(run_dir, run_id)
    now = time.time()
    aged = [(report, _age(run_dir, report, now), _DEAD_AFTER * KEEPALIVE_S * report.interval_s)
            for report in reports]
    is_fresh = any(report.state not in (ENDED, RANKS_ENDED) and age < limit_s for report, age, limit_s in aged)
    if record.exit is not None or not (is_fresh or any(marked_processes(run_id))
                                              or is_launch_running(run_dir, run_id)):
        return None
    ranks = tuple(_life(rank, entry, report, age, limit_s) for report, age, limit_s in aged
                  for rank, entry in report.ranks.items() if entry.ended is None)
    ended = {rank: entry.ended for report in reports for rank, entry in report.ranks.items()
             if entry.ended is not None}
    reported_ranks = {life.rank for life in ranks} | ended.keys()
    missing = tuple(rank for rank in range(launch.world_size) if rank not in reported_ranks)
    return Live(run_id, ranks, tuple(find_silent_ranks(ranks, silent_after_s)), ended, missing)


def _age(run_dir: RunDir, report: NodeReport, now: float) -> float:
    try:
        return max(0.0, now - run_dir.node_report(report.first_rank).stat().st_mtime)
    except OSError:
        return 0.0


def _life(rank: int, entry: RankReport, report: NodeReport, age: float, limit_s: float) -> RankLife:
    """Return the liveness of a rank from its entry in a report of this age."""
    return RankLife(rank, report.host, entry.phase, entry.step,
                    None if entry.silent_s is None else entry.silent_s + age,
                    entry.idle_s + age, age, limit_s, entry.state)


def as_lines(live: Live) -> list[str]:
    """Return lines about all ranks, grouped by phase and step."""
    groups = group_by_key((_activity(life), life) for life in sorted(live.ranks, key=lambda life: life.rank))
    lines = [f"{rank_ranges(life.rank for life in ranks)}: {activity}, last sign of life within "
             f"{max(life.quiet_s for life in ranks):.0f} s" for activity, ranks in groups.items()]
    lines += [f"{rank_ranges(rank for rank, ended in live.ended.items() if ended == code)}: ended with code {code}"
              for code in sorted(set(live.ended.values()))]
    if live.missing:
        lines.append(f"not started yet: {rank_ranges(live.missing)}")
    return lines


def as_details(live: Live, stacks: Mapping[int, str]) -> dict[str, object]:
    """Return the state as JSON values."""
    return {
        "state": "running",
        "ranks": {life.rank: {"host": life.host, "phase": life.phase, "step": life.step,
                              "quiet_s": round(life.quiet_s, 1)} for life in live.ranks},
        "ended": dict(live.ended), "missing": list(live.missing),
        "silent": [life.rank for life in live.silent], "stacks": dict(stacks),
    }


def describe_silent_ranks(silent: Sequence[RankLife]) -> str:
    """Return one line about the silent ranks; the first is the most likely cause."""
    other_ranks = fold_numbers(life.rank for life in silent[1:])
    return f"silent: {silent[0]}" + (f" (and {len(silent) - 1} more: {other_ranks})" if other_ranks else "")


def _activity(life: RankLife) -> str:
    if life.silent_s is None:
        return "no heartbeats"
    step = "" if life.step is None else f", step {life.step}"
    return f"{life.phase or 'an unnamed phase'}{step}"


_NAMED_AFTER_S = 60.0
"""Time after which launch prints which ranks have not started."""
_NAMED_EVERY_S = 30.0
"""Minimum time between two such messages: the ranks of a large run start one by one."""
_START_ERROR_DELAY_S = 2.0
"""Delay from a launcher's error message to the end of the run: a rank may still start, or more nodes may fail."""
_MAX_BYTES = 1 << 18
"""Limit on reading the launcher's log."""


class StartMonitor:
    """Monitor of the start of a run: which ranks are missing, and for how long (see `HeartbeatMonitor.missing`).

    Args:
        facts: facts about the run before its end.
        limit_s: time limit for the start of all ranks; None for no limit.
        named_after_s: time of the first message that names missing ranks.
    """

    def __init__(self, facts: RunFacts, run_dir: RunDir, limit_s: float | None,
                 named_after_s: float = _NAMED_AFTER_S) -> None:
        self._facts = facts
        self._log = run_dir.launcher_log
        self._limit_s = limit_s
        self._named_after_s = named_after_s
        self._named_ranks: frozenset[int] = frozenset()
        self._name_at = named_after_s
        self._read_bytes = 0
        self._start_error: LogMatch | None = None
        self._start_error_at_s = 0.0

    def progress_message(self, missing: Mapping[int, str], waited_s: float) -> str | None:
        """Return a message about the `missing` ranks after `waited_s` seconds, or None if nothing has changed."""
        if not missing and self._named_ranks:
            self._named_ranks = frozenset()
            return f"all {self._facts.world_size} ranks have started, the last after {waited_s:.0f} s"
        if not missing or waited_s < self._name_at or self._named_ranks == missing.keys():
            return None
        self._named_ranks, self._name_at = frozenset(missing), waited_s + _NAMED_EVERY_S
        ended = f"; launch ends the run after {self._limit_s:.0f} s (--start-timeout)" if self._limit_s else ""
        return (f"{len(missing)} of {self._facts.world_size} ranks have not started after {waited_s:.0f} s: "
                f"{fold_rank_places(missing)}{ended}")

    def stop_reason(self, missing: Mapping[int, str], waited_s: float) -> Stop | None:
        """Return the reason to end the run, if the launcher cannot start a rank or the time limit has passed."""
        if not missing:
            return None
        if self._start_error is None and (error := self._find_start_error(missing)):
            self._start_error, self._start_error_at_s = error, waited_s
        if self._start_error is not None and waited_s - self._start_error_at_s > _START_ERROR_DELAY_S:
            return Stop("refused",
                        f"{self._start_error.text}; {fold_rank_places(missing)} cannot start; launch ended the run")
        if self._limit_s is not None and waited_s > self._limit_s:
            return Stop("late", f"{fold_rank_places(missing)} did not start within {self._limit_s:g} s"
                                " (--start-timeout); launch ended the run")
        return None

    def _find_start_error(self, missing: Mapping[int, str]) -> LogMatch | None:
        """Return the launcher's error message about a rank that has not started."""
        try:
            size = self._log.stat().st_size
        except OSError:
            return None
        if size == self._read_bytes or self._read_bytes >= _MAX_BYTES:
            return None
        self._read_bytes = size
        matches = read_messages(system_text(self._log, most=_MAX_BYTES), self._facts)
        not_started = [match for match in matches if match.kind in (NOT_STARTED, WRONG_WORLD)]
        ended = [match for match in matches if match.kind == log_kinds.ENDED and missing.keys() & set(match.ranks)]
        return next(iter((*not_started, *ended)), None)
