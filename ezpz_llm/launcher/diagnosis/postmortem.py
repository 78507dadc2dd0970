"""Post-mortem of a run, from its directory and the facts that launch recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.core.base import UserError, is_own, system_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import Launch, RunRecord, read_own_record, read_record
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics.log_text import cut_lines
from ezpz_llm.launcher.basics.messages import ENDED, RANKS_ENDED, NodeReport, RankReport, read_reports
from ezpz_llm.launcher.basics.variables import FAILURE_TEXTS_VARIABLE, RUN_ID_VARIABLE
from ezpz_llm.launcher.diagnosis.advice import find_advice, resume_command
from ezpz_llm.launcher.diagnosis.collective_differences import describe_difference
from ezpz_llm.launcher.diagnosis.differences import Frame, main_stack, stack_in_log
from ezpz_llm.launcher.diagnosis.log_patterns import read_abort, read_messages
from ezpz_llm.launcher.diagnosis.postmortem_text import Content, as_details, as_text, cause_line
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, Verdict, find_root_cause
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.known_failures import (
    FailureText,
    shipped_texts,
    site_files,
    site_texts,
    slow_pattern_notes,
)
from ezpz_llm.launcher.on_nodes.node.builds import find_locks
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Postmortem, Raised, RunFacts, read_failures
from ezpz_llm.launcher.on_nodes.tracebacks import (
    MAX_LINES_AFTER,
    last_exception,
    last_exception_in_thread,
    last_output_lines,
)

_TAIL_BYTES = 1 << 17
_TAIL_LINES = 20
_LOGS_READ = 16
_STACKS_READ = 64
_CLOCK_SLACK_S = 60.0
"""Allowance for a file server's clock; files older than the start belong to an earlier run in the directory."""


def postmortem_of(run_dir: RunDir, facts: RunFacts, env: Mapping[str, str] | None = None) -> Postmortem:
    """Build the post-mortem of a run from the files in its directory and from `facts`. Writes nothing.

    Args:
        env: the variables that launch passed to the ranks, if launch is the caller; by default those in run.json.
    """
    own_launch = _launch_record(run_dir, read_own_record)
    launch = (_launch_record(run_dir, read_record) if own_launch is None else own_launch) or Launch()
    run_id = (launch.env or {}).get(RUN_ID_VARIABLE, "")
    nodes = read_reports(run_dir, run_id)
    started = launch.started or 0.0
    # If the clock was set back, modification times cannot be compared with the start.
    since = started - _CLOCK_SLACK_S if facts.ended >= started else 0.0
    world = range(facts.world_size)
    reports = {rank: report for node in nodes for rank, report in node.ranks.items() if rank in world}
    records = [failure for failure in read_failures(run_dir, run_id) if failure.rank in world]
    failures = tuple(_attribute_to_launch(failure, facts)
                     for failure in records or _records_from_reports(reports, facts, started, run_id))
    recorded = {failure.rank for failure in failures}
    unrecorded = [rank for rank in world
                  if rank not in recorded and (rank not in reports or reports[rank].ended is None)]
    # If launch ended the run, ranks on nodes that cleaned up have not vanished: they only ignored the signal.
    ranks_cleaned_up = {rank for node in nodes if facts.stopped is not None and node.state in (ENDED, RANKS_ENDED)
                        for rank in node.ranks}
    absent = tuple(rank for rank in unrecorded if rank not in ranks_cleaned_up) if nodes else ()
    log_tails = {rank: tail_text(run_dir.rank_log(rank), since) for rank in unrecorded[:_LOGS_READ]}
    facts = replace(facts, steps=frozenset(node.slurm_step for node in nodes if node.slurm_step))
    # MPI_Abort prints to the log of the rank that calls it.
    messages = (*read_messages(tail_text(run_dir.launcher_log, since), facts),
                *(abort for rank, tail in log_tails.items() for abort in read_abort(tail, rank)))
    is_own_record = own_launch is not None
    texts, notes = _texts(env) if env is not None else _recorded_texts(launch.env or {}, is_own_record)
    stacks = _stacks(run_dir, facts.stopped, since)
    evidence = Evidence(failures, messages, facts, absent, _exceptions_in_logs(log_tails),
                        _silent_nodes(nodes, facts), _ended_early(reports, facts), texts,
                        stacks, _exiting(run_dir, facts.stopped, stacks, since),
                        _in_threads(run_dir, facts.stopped, failures, since))
    verdict = find_root_cause(evidence)
    if verdict is None or _all_succeeded(facts, reports, failures):
        return Postmortem(facts, 0, "all ranks succeeded")
    typed = None if own_launch is None else own_launch.typed or ()
    difference = None
    if verdict.kind in (Kind.IDLE, Kind.COLLECTIVE_TIMEOUT):
        difference = describe_difference(run_dir, facts.world_size, since,
                                         of_timeout=verdict.kind is Kind.COLLECTIVE_TIMEOUT)
    content = Content(run_dir, evidence, verdict, reports, *_last_lines(run_dir, verdict),
                      find_advice(verdict, evidence, run_dir, typed), resume_command(run_dir, typed), difference)
    notes += slow_pattern_notes(texts)
    # Another user's run must not suggest files to remove.
    output = [line for failure in failures for line in failure.tail] if is_own_record else []
    locks = find_locks((own_launch or Launch()).env or {}, output)
    notes += [f"  {lock}" for lock in locks if lock.worker is None]
    notes += [f"  could not be killed, still running on {node.host}: processes {', '.join(map(str, node.left))}"
              for node in nodes if node.left]
    text, brief = ("\n".join([as_text(content, with_lines), *notes]) for with_lines in (True, False))
    return Postmortem(facts, verdict.code, cause_line(content), text, verdict.rank, verdict.kind.name.lower(),
                      as_details(content), brief, content.lines_of)


def _texts(env: Mapping[str, str]) -> tuple[tuple[FailureText, ...], list[str]]:
    """Return the known failure texts, and notes about site files that cannot be read.

    Site files are named by the reader's environment, else by `env`.
    """
    try:
        return (*site_texts(os.environ, env), *shipped_texts()), []
    except UserError as error:
        return shipped_texts(), [f"  {error.where or FAILURE_TEXTS_VARIABLE}: ignored: {error.found}"]


def _recorded_texts(env: Mapping[str, str], is_own_record: bool) -> tuple[tuple[FailureText, ...], list[str]]:
    """Return the same as `_texts` for the variables in run.json, if the reader owns it.

    A user who can write run.json, or a file that it names, could print advice in launch's name. So both must
    belong to the reader; site files may also belong to root.
    """
    if os.environ.get(FAILURE_TEXTS_VARIABLE) or not env.get(FAILURE_TEXTS_VARIABLE):
        return _texts({})
    if is_own_record:
        with contextlib.suppress(UserError):  # an invalid path
            is_own_record = all(is_own(path, or_roots=True) or not path.exists() for path in site_files(env))
    if is_own_record:
        return _texts(env)
    note = ("  ignored: the failure texts named in run.json, because another user could have written them. Set"
            f" {FAILURE_TEXTS_VARIABLE}=FILE to use those of your site")
    return shipped_texts(), [note]


def bare_postmortem(run_dir: RunDir, run_id: str, facts: RunFacts) -> Postmortem:
    """Build a post-mortem if the run's files are damaged: launch's reason, else the first nonzero exit code."""
    codes: list[int] = []
    with contextlib.suppress(Exception):
        codes += [failure.exit_code for failure in read_failures(run_dir, run_id)]
    with contextlib.suppress(Exception):
        codes += [report.ended for node in read_reports(run_dir, run_id) for report in node.ranks.values()
                  if report.ended]
    verdict = find_root_cause(Evidence((), (), facts))
    if verdict is None:
        return Postmortem(facts, 0, "all ranks succeeded")
    is_from_launch = facts.stopped is not None and facts.stopped.kind != "rank"
    code = verdict.code if is_from_launch else next(iter(codes), verdict.code)
    cause = facts.stopped.text if facts.stopped is not None else f"a rank failed: exit code {code}"
    return Postmortem(facts, code, cause, f"launch: {cause}; the logs are in {run_dir.rank_log(0).parent}")


def _records_from_reports(reports: Mapping[int, RankReport], facts: RunFacts, started: float,
                          run_id: str) -> list[Failure]:
    """Build records from the nodes' reports if no rank could write one (full disk, damaged errors/)."""
    return sorted((Failure(rank, facts.hosts[rank], report.pid or 0, report.ended, None,
                           started + (report.lived_s or 0.0), report.lived_s or 0.0,
                           tail=(report.error,) if report.error else (), phase=report.phase, step=report.step,
                           launch=run_id)
                   for rank, report in reports.items() if report.ended
                   and (facts.failed_before_stop is None or rank in facts.failed_before_stop)),
                  key=lambda failure: failure.ended)


def _launch_record(run_dir: RunDir, read: Callable[[RunDir], RunRecord | None]) -> Launch | None:
    # The program may have overwritten run.json; explain the run's end nevertheless.
    with contextlib.suppress(UserError):
        record = read(run_dir)
        return None if record is None else record.launch or Launch()
    return None


def _silent_nodes(nodes: list[NodeReport], facts: RunFacts) -> tuple[str, ...]:
    """Return the nodes that have not reported the end of their ranks, if other nodes have.

    RANKS_ENDED is enough: Slurm may end an agent that has ended its ranks and waits for the launcher's helpers.
    """
    silent = [node for node in nodes if node.state not in (ENDED, RANKS_ENDED)]
    if len(silent) == len(nodes):
        return ()
    return tuple(dict.fromkeys(facts.hosts[rank] for node in silent for rank in node.ranks))


def _ended_early(reports: Mapping[int, RankReport], facts: RunFacts) -> dict[int, float]:
    """Return the lifetimes of ranks that ended with code 0 before launch ended the run."""
    before = facts.ended_before_stop
    return {rank: report.lived_s for rank, report in reports.items()
            if report.ended == 0 and report.lived_s is not None and (before is None or rank in before)}


def _all_succeeded(facts: RunFacts, reports: Mapping[int, RankReport], failures: tuple[Failure, ...]) -> bool:
    """Return True if all ranks ended with code 0, but launch was killed before it could record that."""
    return facts.launcher_status is None and not failures and all(
        rank in reports and reports[rank].ended == 0 for rank in range(facts.world_size))


def _attribute_to_launch(failure: Failure, facts: RunFacts) -> Failure:
    """Attribute a rank's signal to launch if launch was already ending the run."""
    if facts.stopped is None or failure.ended_by is None or failure.rank in (facts.failed_before_stop or ()):
        return failure
    return replace(failure, ended_by="launch")


def _exceptions_in_logs(log_tails: Mapping[int, str], within: int = MAX_LINES_AFTER) -> dict[int, Raised]:
    """Return the exceptions at the end of the logs of ranks that were killed together with their shims."""
    exceptions = {rank: last_exception(end, within) for rank, end in log_tails.items()}
    return {rank: raised for rank, raised in exceptions.items() if raised is not None}


def _stacks(run_dir: RunDir, stopped: Stop | None, since: float) -> dict[int, list[Frame]]:
    """Return the stacks of silent ranks: as launch took them, else as the ranks printed them on SIGABRT."""
    ranks = stopped.ranks[:_STACKS_READ] if stopped is not None else ()
    stacks = {rank: main_stack(tail_text(run_dir.rank_stacks(rank), since)) for rank in ranks}
    if not any(stacks.values()):
        stacks = {rank: stack_in_log(tail_text(run_dir.rank_log(rank), since)) for rank in ranks}
    return {rank: frames for rank, frames in stacks.items() if frames}


def _exiting(run_dir: RunDir, stopped: Stop | None, stacks: Mapping[int, list[Frame]],
             since: float) -> dict[int, Raised]:
    """Return the exceptions that end the logs of silent ranks without a Python stack, if other ranks have one."""
    ranks = stopped.ranks[:_STACKS_READ] if stopped is not None and stopped.kind == "idle" and stacks else ()
    log_tails = {rank: tail_text(run_dir.rank_log(rank), since) for rank in ranks if rank not in stacks}
    return _exceptions_in_logs(log_tails, within=0)


def _in_threads(run_dir: RunDir, stopped: Stop | None, failures: Sequence[Failure],
                since: float) -> dict[int, Raised]:
    """Return the exceptions of threads and child processes that end the logs of ranks that launch ended."""
    if stopped is None or stopped.kind not in ("idle", "rank"):
        return {}
    ranks = stopped.ranks or [failure.rank for failure in failures if failure.ended_by == "launch"]
    exceptions = {rank: last_exception_in_thread(tail_text(run_dir.rank_log(rank), since))
                  for rank in ranks[:_STACKS_READ]}
    return {rank: raised for rank, raised in exceptions.items() if raised is not None}


def tail_text(path: Path, since: float = 0.0) -> str:
    """Return the last 128 KiB of a file with long lines truncated; "" if it was not written since `since`."""
    with contextlib.suppress(OSError):
        return "" if path.stat().st_mtime < since else cut_lines(system_text(path, _TAIL_BYTES))
    return ""


def _last_lines(run_dir: RunDir, verdict: Verdict) -> tuple[int | None, list[str]]:
    """Return the rank that caused the failure, else the rank with the newest log, and the end of that log."""
    rank = verdict.rank
    if rank is None:
        logs = [log for log in run_dir.rank_log(0).parent.glob("rank*.log") if log.is_file() and log.stat().st_size]
        last = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        rank = int(last.stem[4:]) if last is not None else None
    return rank, last_output_lines(tail_text(run_dir.rank_log(rank)), _TAIL_LINES) if rank is not None else []
