"""A run that still goes on: what its ranks are doing, and which of them is silent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.launch.failures.ranks import fold, named
from ezpz_llm.launch.liveness import RankLife, judge
from ezpz_llm.launch.node.processes import marked
from ezpz_llm.launch.node.report import ENDED, KEEPALIVE_S, RANKS_ENDED, NodeReport, read_reports
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.rundir.paths import RunDir

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
    """The state of the run, None for one that is over: it says so, or nothing of it has been heard for long."""
    launch = record["launch"]
    run_id = launch["env"][RUN_ID_VARIABLE]
    reports = read_reports(run_dir, run_id)
    now = time.time()
    fresh = [report for report in reports if report.state not in (ENDED, RANKS_ENDED)
             and _age(run_dir, report, now) < _GONE_AFTER * KEEPALIVE_S * report.interval_s]
    if record.get("exit") is not None or not (fresh or any(marked(run_id))):
        return None
    ranks = tuple(_life(rank, one, report, _age(run_dir, report, now)) for report in reports
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


def _life(rank: int, one: Any, report: NodeReport, age: float) -> RankLife:
    return RankLife(rank, report.host, one.phase, one.step, None if one.silent_s is None else one.silent_s + age,
                    one.idle_s + age, age, _GONE_AFTER * KEEPALIVE_S * report.interval_s, one.state)


def as_lines(live: Live) -> list[str]:
    """All ranks, folded by what they are doing."""
    groups: dict[str, list[RankLife]] = {}
    for one in live.ranks:
        groups.setdefault(_doing(one), []).append(one)
    lines = []
    for doing, ranks in sorted(groups.items(), key=lambda group: group[1][0].rank):
        longest = max(one.quiet_s for one in ranks)
        lines.append(f"{named(one.rank for one in ranks)}: {doing}, last sign of life within {longest:.0f} s")
    for code in sorted(set(live.ended.values())):
        lines.append(f"{named(rank for rank, one in live.ended.items() if one == code)}: ended with code {code}")
    if live.missing:
        lines.append(f"not heard of yet: {named(live.missing)}")
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
    more = f" (and {len(silent) - 1} more: {fold(one.rank for one in silent[1:])})" if len(silent) > 1 else ""
    return f"silent: {silent[0]}{more}"


def _doing(one: RankLife) -> str:
    if one.silent_s is None:
        return "no heartbeats"
    step = "" if one.step is None else f", step {one.step}"
    return f"{one.phase or 'an unnamed phase'}{step}"
