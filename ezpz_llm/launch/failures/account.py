"""The account of a run's end, from the run directory and what launch saw of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.launch.failures.advice import advice
from ezpz_llm.launch.failures.facts import Account, RunFacts
from ezpz_llm.launch.failures.judge import Evidence, Verdict, judge
from ezpz_llm.launch.failures.record import Failure, Raised, read_failures
from ezpz_llm.launch.failures.sayings import read_sayings
from ezpz_llm.launch.failures.text import Findings, as_details, as_text, cause_line
from ezpz_llm.launch.failures.tracebacks import last_exception
from ezpz_llm.launch.node.report import ENDED, RANKS_ENDED, NodeReport, RankReport, read_reports
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.rundir.layout import RunDir
from ezpz_llm.rundir.record import read_record

_TAIL_BYTES = 1 << 17
_TAIL_LINES = 20
_LOGS_READ = 16
_CLOCK_SLACK_S = 60.0
"""An older file is of an earlier run in the same directory; clocks of file servers differ a little."""
_ABORT = re.compile(r".*application called MPI_Abort\([^,]+, \d+\) - process \d+.*")


def account(run_dir: RunDir, facts: RunFacts) -> Account:
    """Tell from the files of the run directory, and from `facts`, how the run ended. Reads only."""
    launch = _launch_record(run_dir)
    nodes = read_reports(run_dir, (launch.get("env") or {}).get(RUN_ID_VARIABLE, ""))
    since = launch.get("started", 0.0) - _CLOCK_SLACK_S
    failures = tuple(_as_stopped(failure, facts) for failure in read_failures(run_dir))
    reports = {rank: report for node in nodes for rank, report in node.ranks.items()}
    recorded = {failure.rank for failure in failures}
    absent = _absent(nodes, facts, recorded)
    without = [rank for rank in range(facts.world_size)
               if rank not in recorded and (rank not in reports or reports[rank].ended is None)]
    ends = {rank: tail_text(run_dir.rank_log(rank), since) for rank in without[:_LOGS_READ]}
    said = tail_text(run_dir.launcher_log, since) + _aborts(ends.values())
    evidence = Evidence(failures, tuple(read_sayings(said)), facts, absent, _raised(ends),
                        _silent(nodes, facts))
    verdict = judge(evidence)
    if verdict is None or _ended_well(facts, reports, failures):
        return Account(facts, 0, "all ranks ended well")
    findings = Findings(run_dir, evidence, verdict, reports, last_lines(run_dir, verdict),
                        advice(verdict, run_dir, facts, launch.get("typed") or ()))
    return Account(facts, verdict.code, cause_line(findings), as_text(findings), verdict.rank,
                   verdict.kind.name.lower(), as_details(findings))


def _launch_record(run_dir: RunDir) -> Mapping[str, Any]:
    # The program may have written over it: that is no reason to keep silent about the program's own end.
    with contextlib.suppress(UserError):
        return read_record(run_dir).get("launch") or {}
    return {}


def _absent(nodes: list[NodeReport], facts: RunFacts, recorded: set[int]) -> tuple[int, ...]:
    """Ranks that vanished: no record, no mark of an end. Where launch itself ended the run, those on nodes that
    cleared up are none: they only resisted."""
    if not nodes:
        return ()
    told: dict[int, RankReport] = {}
    cleared: set[int] = set()
    for node in nodes:
        told.update(node.ranks)
        if facts.stopped is not None and node.state in (ENDED, RANKS_ENDED):
            cleared.update(node.ranks)
    return tuple(rank for rank in range(facts.world_size)
                 if rank not in recorded and rank not in cleared
                 and (rank not in told or told[rank].ended is None))


def _silent(nodes: list[NodeReport], facts: RunFacts) -> tuple[str, ...]:
    """The hosts that have not reported the end of their ranks, if others have: launch waits for all of them.

    Slurm may end an agent that has cleared its ranks and waits for the launcher's helpers.
    """
    silent = [node for node in nodes if node.state not in (ENDED, RANKS_ENDED)]
    if len(silent) == len(nodes):
        return ()
    return tuple(dict.fromkeys(facts.hosts[rank] for node in silent for rank in node.ranks))


def _ended_well(facts: RunFacts, reports: Mapping[int, RankReport], failures: tuple[Failure, ...]) -> bool:
    """Did all ranks end well in a run whose launch was killed before it could write so?"""
    return facts.launcher_status is None and not failures and all(
        rank in reports and reports[rank].ended == 0 for rank in range(facts.world_size))


def _as_stopped(failure: Failure, facts: RunFacts) -> Failure:
    """A rank that was told to end after launch had begun to end the run was told so by launch, by whatever way."""
    if facts.stopped is None or failure.ended_by is None or failure.rank in (facts.failed_before_stop or ()):
        return failure
    return replace(failure, ended_by="launch")


def _raised(ends: Mapping[int, str]) -> dict[int, Raised]:
    """The exceptions that logs end with, of ranks whose shims ended with them."""
    found = {rank: last_exception(end) for rank, end in ends.items()}
    return {rank: raised for rank, raised in found.items() if raised is not None}


def _aborts(ends: Iterable[str]) -> str:
    """MPI_Abort speaks in the log of the rank that calls it."""
    return "".join(f"\n{line}" for end in ends for line in _ABORT.findall(end))


def tail_text(path: Path, since: float = 0.0) -> str:
    """The end of a file that may hold anything; empty where there is none that was written since `since`."""
    try:
        if path.stat().st_mtime < since:
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(run_dir: RunDir, verdict: Verdict) -> list[str]:
    """The end of the cause's log, or of the log that was written last, for a rank without a record."""
    logs = sorted(run_dir.rank_log(0).parent.glob("rank*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    log = run_dir.rank_log(verdict.rank) if verdict.rank is not None else next(
        (log for log in logs if log.stat().st_size), None)
    return tail_text(log).splitlines()[-_TAIL_LINES:] if log is not None else []
