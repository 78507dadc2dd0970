"""Signs of life of a running launch, as the agents of its nodes report them: who is silent, and who only waits."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.base import grouped, system_text
from ezpz_llm.launch.failures import log_kinds
from ezpz_llm.launch.failures.facts import Stop
from ezpz_llm.launch.failures.log_kinds import NOT_STARTED, WRONG_WORLD
from ezpz_llm.launch.failures.log_patterns import LogMatch, read_matches
from ezpz_llm.launch.hostlist import fold_numbers, fold_places, rank_ranges
from ezpz_llm.launch.node.messages import ENDED, KEEPALIVE_S, RANKS_ENDED, NodeReport, RankReport, read_reports
from ezpz_llm.launch.node.processes import marked
from ezpz_llm.launch.owner import launch_lives
from ezpz_llm.launch.variables import PATIENT, RENDEZVOUS, RUN_ID_VARIABLE
from ezpz_llm.rundir import RunDir

START_S = 60.0
"""What the start of a rank may take beyond the idle limit."""

_TRACE = re.compile(r"(?P<kind>rank|node)(?P<rank>\d+)(?:\.json)?")
UNUSUAL_STATES = {"T": "stopped by a signal (state T; kill -CONT continues it)",
                  "D": "waits for a device or a file system (state D)"}
"""States of a process, by the kernel's letters, that a rank is not in as a rule."""
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
        state = f"; {UNUSUAL_STATES[self.state]}" if self.state in UNUSUAL_STATES else ""
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
        return sorted(silent, key=lambda one: _suspect(one.state))
    at_work = [-1 if one.step is None else one.step for one in beating
               if one.phase in PATIENT and min(one.silent_s or 0.0, one.idle_s) <= limit_s]
    earliest = min(at_work, default=None)
    is_awaited = any(one.silent_s is None and one.idle_s <= limit_s for one in ranks)
    silent = [one for one in ranks if one.quiet_s > limit_s and not (
        (earliest is not None and (one.step is None or earliest <= one.step))
        or (is_awaited and one.phase == RENDEZVOUS))]
    return sorted(silent, key=lambda one: (not one.node_is_silent, _suspect(one.state),
                                           -1 if one.step is None else one.step, -one.quiet_s))


def _suspect(state: str | None) -> int:
    """The lower, the sooner it is the cause: nobody stops by himself, but all may read from one disk."""
    return {"T": 0, "D": 1}.get(state or "", 2)


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
        self.missing = dict(hosts)
        """The ranks that have not come yet, with their hosts."""

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
                for rank in report.ranks:
                    self.missing.pop(rank, None)
                if report.error is not None:
                    self._expect_no_reports(report.first_rank)
        if self.missing:
            self._note_traces()

    def _note_traces(self) -> None:
        """Of nodes that cannot report: without a place for an agent their shims make files of their own, and on a
        full disk a report is empty."""
        with contextlib.suppress(OSError), os.scandir(self._run_dir.rank_heartbeat(0).parent) as entries:
            for entry in entries:
                if match := _TRACE.fullmatch(entry.name):
                    rank = int(match["rank"])
                    if match["kind"] == "rank":
                        self.missing.pop(rank, None)
                    elif rank not in self._came and entry.stat().st_size == 0:
                        self._expect_no_reports(rank)

    def _expect_no_reports(self, first_rank: int) -> None:
        host = self._hosts.get(first_rank)
        self.missing = {rank: its for rank, its in self.missing.items() if its != host}

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
                is_over = one.ended is not None or report.state in (RANKS_ENDED, ENDED)
                found[rank] = None if is_over else _life(rank, one, report, now - came, node_limit_s)
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


_GONE_AFTER = 3
"""So many keep-alive intervals without a word, and a node's agent has gone."""


@dataclass(frozen=True)
class Live:
    """A run that goes on. `silent` are the ranks that hold it up, the most suspect first; `ended` the exit codes of
    those that have ended."""

    run_id: str
    ranks: tuple[RankLife, ...]
    silent: tuple[RankLife, ...]
    ended: Mapping[int, int]
    missing: tuple[int, ...]


def look(run_dir: RunDir, record: Mapping[str, Any], silent_after_s: float) -> Live | None:
    """The state of the run, None for one that is over: it says so, or nothing of it has been heard for long. One
    whose ranks have ended goes on until launch has written how."""
    launch = record["launch"]
    run_id = launch["env"][RUN_ID_VARIABLE]
    reports = read_reports(run_dir, run_id)
    now = time.time()
    aged = [(report, _age(run_dir, report, now), _GONE_AFTER * KEEPALIVE_S * report.interval_s)
            for report in reports]
    is_fresh = any(report.state not in (ENDED, RANKS_ENDED) and age < limit_s for report, age, limit_s in aged)
    if record.get("exit") is not None or not (is_fresh or any(marked(run_id)) or launch_lives(run_dir, run_id)):
        return None
    ranks = tuple(_life(rank, one, report, age, limit_s) for report, age, limit_s in aged
                  for rank, one in report.ranks.items() if one.ended is None)
    ended = {rank: one.ended for report in reports for rank, one in report.ranks.items() if one.ended is not None}
    seen = {one.rank for one in ranks} | ended.keys()
    missing = tuple(rank for rank in range(launch["world_size"]) if rank not in seen)
    return Live(run_id, ranks, tuple(judge(ranks, silent_after_s)), ended, missing)


def _age(run_dir: RunDir, report: NodeReport, now: float) -> float:
    try:
        return max(0.0, now - run_dir.node_report(report.first_rank).stat().st_mtime)
    except OSError:
        return 0.0


def _life(rank: int, one: RankReport, report: NodeReport, age: float, limit_s: float) -> RankLife:
    """A rank by a report that is so old."""
    return RankLife(rank, report.host, one.phase, one.step, None if one.silent_s is None else one.silent_s + age,
                    one.idle_s + age, age, limit_s, one.state)


def as_lines(live: Live) -> list[str]:
    """All ranks, folded by what they are doing."""
    groups = grouped((_doing(one), one) for one in sorted(live.ranks, key=lambda one: one.rank))
    lines = [f"{rank_ranges(one.rank for one in ranks)}: {doing}, last sign of life within "
             f"{max(one.quiet_s for one in ranks):.0f} s" for doing, ranks in groups.items()]
    lines += [f"{rank_ranges(rank for rank, one in live.ended.items() if one == code)}: ended with code {code}"
              for code in sorted(set(live.ended.values()))]
    if live.missing:
        lines.append(f"not heard of yet: {rank_ranges(live.missing)}")
    return lines


def as_details(live: Live, stacks: Mapping[int, str]) -> dict[str, object]:
    """The same for programs."""
    return {
        "state": "running",
        "ranks": {one.rank: {"host": one.host, "phase": one.phase, "step": one.step,
                             "quiet_s": round(one.quiet_s, 1)} for one in live.ranks},
        "ended": dict(live.ended), "missing": list(live.missing),
        "silent": [one.rank for one in live.silent], "stacks": dict(stacks),
    }


def who_is_silent(silent: Sequence[RankLife]) -> str:
    """The rank that holds the run up, in one line."""
    others = fold_numbers(one.rank for one in silent[1:])
    return f"silent: {silent[0]}" + (f" (and {len(silent) - 1} more: {others})" if others else "")


def _doing(one: RankLife) -> str:
    if one.silent_s is None:
        return "no heartbeats"
    step = "" if one.step is None else f", step {one.step}"
    return f"{one.phase or 'an unnamed phase'}{step}"


NAMED_AFTER_S = 60.0
"""Ranks that have not come by then are named."""
_AGAIN_AFTER_S = 30.0
"""Ranks of a large run come one by one: those that are left are named no more often than this."""
_WORDS_AFTER_S = 2.0
"""From the launcher's words to the end of the run: a rank may be on its way, or more hosts may be named."""
_MOST_BYTES = 1 << 18
"""Rank 0's standard error is in the launcher's log too: what a chatty program says is no longer read."""


class Arrivals:
    """Follows the start of one run, whose agents report the ranks that have come (HeartbeatMonitor.missing).

    Args:
        hosts: of each rank that is to come.
        limit_s: how long ranks may take to come; None for ever.
        named_after_s: when those that have not come are named for the first time.
    """

    def __init__(self, hosts: Mapping[int, str], run_dir: RunDir, limit_s: float | None,
                 named_after_s: float = NAMED_AFTER_S) -> None:
        self._world_size = len(hosts)
        self._log = run_dir.launcher_log
        self._log_of_rank_0 = run_dir.rank_log(0)
        self._limit_s = limit_s
        self._named_after_s = named_after_s
        self._named: frozenset[int] = frozenset()
        self._name_at = named_after_s
        self._read_bytes = 0
        self._refused: LogMatch | None = None
        self._refused_at_s = 0.0

    def news(self, missing: Mapping[int, str], waited_s: float) -> str | None:
        """What is to be told of the ranks in `missing` after `waited_s` seconds; None if nothing is new."""
        if not missing and self._named:
            self._named = frozenset()
            return f"all {self._world_size} ranks have started, the last after {waited_s:.0f} s"
        if not missing or waited_s < self._name_at or self._named == missing.keys():
            return None
        self._named, self._name_at = frozenset(missing), waited_s + _AGAIN_AFTER_S
        ended = f"; the run is ended after {self._limit_s:.0f} s (--start-timeout)" if self._limit_s else ""
        return (f"{len(missing)} of {self._world_size} ranks have not started after {waited_s:.0f} s: "
                f"{fold_places(missing)}{ended}")

    def verdict(self, missing: Mapping[int, str], waited_s: float) -> Stop | None:
        """Why the run is to be ended: a rank in `missing` cannot start, as the launcher says, or took too long."""
        if not missing:
            return None
        if self._refused is None and (refused := self._refusal(missing)):
            self._refused, self._refused_at_s = refused, waited_s
        if self._refused is not None and waited_s - self._refused_at_s > _WORDS_AFTER_S:
            return Stop("refused", f"{self._refused.text}; {fold_places(missing)} cannot start; the run is ended")
        if self._limit_s is not None and waited_s > self._limit_s:
            return Stop("late", f"{fold_places(missing)} did not start within {self._limit_s:g} s"
                                " (--start-timeout); the run is ended")
        return None

    def _refusal(self, missing: Mapping[int, str]) -> LogMatch | None:
        """The launcher's words about a rank that has not come; of ranks that have come their records tell. Rank 0's
        standard error is in the same log, and in its own."""
        try:
            size = self._log.stat().st_size
        except OSError:
            return None
        if size == self._read_bytes or self._read_bytes >= _MOST_BYTES:
            return None
        self._read_bytes = size
        own = " ".join(system_text(self._log_of_rank_0, most=_MOST_BYTES).split())
        said = [one for one in read_matches(system_text(self._log, most=_MOST_BYTES)) if one.text not in own]
        plain = [one for one in said if one.kind in (NOT_STARTED, WRONG_WORLD)]
        ended = [one for one in said if one.kind == log_kinds.ENDED and missing.keys() & set(one.ranks)]
        return next(iter((*plain, *ended)), None)
