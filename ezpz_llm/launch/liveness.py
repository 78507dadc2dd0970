"""Signs of life of a running launch, as the agents of its nodes report them: who is silent, and who only waits."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.launch.node.report import ENDED, KEEPALIVE_S, RANKS_ENDED, NodeReport, read_reports
from ezpz_llm.launch.variables import MEETING, PATIENT
from ezpz_llm.rundir.paths import RunDir

START_S = 60.0
"""What the start of a rank may take beyond the idle limit."""

_TRACE = re.compile(r"(?P<kind>rank|node)(?P<rank>\d+)(?:\.json)?")
_STATES = {"T": "stopped by a signal (state T; kill -CONT continues it)",
           "D": "waits for a device or a file system (state D)"}
_LOOK_WITHIN_S = 10.0
"""Looks are this close together as long as nothing holds us up."""


@dataclass(frozen=True)
class RankLife:
    """How long one rank has been quiet, in seconds up to now: `silent_s` without a heartbeat (None: it never gave
    one), `idle_s` without processor time or output, `node_s` without a report of its node. `state` is the kernel's
    letter for its main process."""

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
        """Since its last sign of life, of the kind that counts for it."""
        return self.idle_s if self.silent_s is None else self.silent_s

    @property
    def node_is_silent(self) -> bool:
        """Has the node itself gone, as far as one can tell from here?"""
        return self.node_s > self.node_limit_s

    def __str__(self) -> str:
        doing = self.phase or "before its first heartbeat"
        step = "" if self.step is None else f", step {self.step}"
        node = f"; nothing comes from its node, since {self.node_s:.0f} s" if self.node_is_silent else ""
        state = f"; {_STATES[self.state]}" if self.state in _STATES else ""
        return f"rank {self.rank} on {self.host}: {doing}{step}, silent for {self.quiet_s:.0f} s{state}{node}"


def judge(ranks: Sequence[RankLife], limit_s: float) -> list[RankLife]:
    """The ranks whose silence ends a run, the most suspect first; none while the run lives.

    Ranks of a program without heartbeats are judged together: one that works is enough. Ranks with heartbeats are
    judged one by one, except that a rank may wait for one that is at work in a phase without heartbeats and has
    come no further than itself.
    """
    beating = [one for one in ranks if one.silent_s is not None]
    if not beating:
        silent = list(ranks) if all(one.idle_s > limit_s for one in ranks) else []
        return sorted(silent, key=lambda one: one.state != "T")
    at_work = [-1 if one.step is None else one.step for one in beating
               if one.phase in PATIENT and min(one.silent_s or 0.0, one.idle_s) <= limit_s]
    earliest = min(at_work, default=None)
    is_awaited = any(one.silent_s is None and one.idle_s <= limit_s for one in ranks)
    silent = [one for one in ranks if one.quiet_s > limit_s and not (
        (earliest is not None and (one.step is None or earliest <= one.step))
        or (is_awaited and one.phase == MEETING))]
    return sorted(silent, key=lambda one: (not one.node_is_silent, one.state != "T",
                                           -1 if one.step is None else one.step, -one.quiet_s))


class HeartbeatMonitor:
    """Follows the nodes' reports. What they say of ages is by their own clocks; the time since a report came is by
    ours, so that clocks that differ do no harm."""

    def __init__(self, run_dir: RunDir, run_id: str, hosts: Mapping[int, str], started: float) -> None:
        """Args:
            hosts: the host of each rank that is to come.
            started: monotonic time.
        """
        self._run_dir = run_dir
        self._run_id = run_id
        self._hosts = hosts
        self._started = self._looked = started
        self._came: dict[int, tuple[NodeReport, float]] = {}
        self._missing = dict(hosts)

    def look(self, now: float) -> None:
        """Read what has come since the last look. Time in which we could not look (a file system that hung, a
        laptop that slept) is nobody's silence."""
        blind_s = now - self._looked - _LOOK_WITHIN_S - self.interval_s
        self._looked = now
        if blind_s > 0:
            self._started += blind_s
            self._came = {node: (report, came + blind_s) for node, (report, came) in self._came.items()}
        for report in read_reports(self._run_dir, self._run_id):
            before = self._came.get(report.first_rank)
            if before is None or before[0] != report:
                self._came[report.first_rank] = (report, now)
                self._note_arrivals(report)
        if self._missing:
            self._note_traces()

    def _note_arrivals(self, report: NodeReport) -> None:
        for rank in report.ranks:
            self._missing.pop(rank, None)
        if report.error is not None:
            self._expect_no_reports(report.first_rank)

    def _note_traces(self) -> None:
        """Of nodes that cannot report: without a place for an agent their shims make files of their own, and on a
        full disk a report is empty."""
        with contextlib.suppress(OSError), os.scandir(self._run_dir.rank_heartbeat(0).parent) as entries:
            for entry in entries:
                if match := _TRACE.fullmatch(entry.name):
                    rank = int(match["rank"])
                    if match["kind"] == "rank":
                        self._missing.pop(rank, None)
                    elif rank not in self._came and entry.stat().st_size == 0:
                        self._expect_no_reports(rank)

    def _expect_no_reports(self, first_rank: int) -> None:
        host = self._hosts.get(first_rank)
        self._missing = {rank: its for rank, its in self._missing.items() if its != host}

    @property
    def missing(self) -> Mapping[int, str]:
        """The ranks that have not come yet, with their hosts."""
        return self._missing

    def waited_s(self, now: float) -> float:
        """Seconds since the launcher was started, but for those in which we could not look."""
        return now - self._started

    @property
    def nodes(self) -> list[NodeReport]:
        """The latest report of each node."""
        return [report for report, _ in self._came.values()]

    @property
    def interval_s(self) -> float:
        """How often nodes report."""
        return max((report.interval_s for report in self.nodes), default=1.0)

    def limit_s(self, wanted_s: float) -> float:
        """The idle limit, raised to what reports that come this seldom allow."""
        return wanted_s if self.interval_s <= 1.0 else max(wanted_s, 3 * self.interval_s)

    def ranks(self, now: float) -> list[RankLife]:
        """Every rank that has not ended; one that has never been reported counts as idle once its start has taken
        too long."""
        node_limit_s = 3 * KEEPALIVE_S * self.interval_s
        found = {}
        for report, came in self._came.values():
            for rank, one in report.ranks.items():
                found[rank] = None if one.ended is not None or report.state in (RANKS_ENDED, ENDED) else RankLife(
                    rank, report.host, one.phase, one.step,
                    None if one.silent_s is None else one.silent_s + now - came, one.idle_s + now - came,
                    now - came, node_limit_s, one.state)
        for rank, host in self._hosts.items():
            if rank not in found:
                waited = now - self._started - START_S
                found[rank] = RankLife(rank, host, None, None, None, waited, waited, node_limit_s)
        return [one for one in found.values() if one is not None]

    def silent_nodes(self, now: float, for_s: float) -> list[tuple[NodeReport, float]]:
        """Nodes without a report for longer than `for_s` (and than reports may take), with that time, while others
        report."""
        limit_s = max(for_s, 3 * KEEPALIVE_S * self.interval_s)
        ages = [(report, now - came) for report, came in self._came.values()
                if report.state not in (ENDED, RANKS_ENDED)]
        if all(age > limit_s for _, age in ages):
            return []
        return [(report, age) for report, age in ages if age > limit_s]
