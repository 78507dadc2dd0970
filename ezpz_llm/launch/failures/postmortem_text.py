"""Text of the post-mortem: the root cause, then its consequences in groups, and advice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ezpz_llm.base import group_by_key
from ezpz_llm.base.shell_commands import to_typable_text
from ezpz_llm.launch.failures import log_kinds, log_patterns
from ezpz_llm.launch.failures.classify import Finding, error_line_before_crash, has_crashed, summarize_lost_peer
from ezpz_llm.launch.failures.kinds import FOLLOWERS, Kind
from ezpz_llm.launch.failures.run_facts import Failure, Raised
from ezpz_llm.launch.failures.verdict_rules import Evidence, Verdict
from ezpz_llm.launch.hostlist import fold_numbers, rank_ranges
from ezpz_llm.launch.hostnames import NodeNames
from ezpz_llm.launch.node.messages import RankReport
from ezpz_llm.rundir import RunDir

_EVIDENCE_CHARACTERS = 300
_OTHERS_SHOWN = 8
_MESSAGES_SHOWN = 4
_MAX_SIMILAR = 3
_NUMBERS = re.compile(r"(?:[\s+-]{,40}\d[\d.,]*(?:e[+-]?\d+)?)+")
_NUMBER = re.compile(r"\d+")
_PLAIN = (Kind.SIGNAL, Kind.EXIT, Kind.EXCEPTION)


@dataclass(frozen=True)
class Findings:
    """Content of the post-mortem.

    Attributes:
        lines: the last lines of the output of rank `lines_of`.
        resume: the command that resumes from the last checkpoint, if there is one.
    """

    run_dir: RunDir
    evidence: Evidence
    verdict: Verdict
    reports: Mapping[int, RankReport]
    lines_of: int | None
    lines: Sequence[str]
    advice: str | None
    resume: str | None = None

    @property
    def cause(self) -> Failure | None:
        """Record of the rank that is the cause; None if the cause is ranks that others waited for."""
        if self.verdict.waiting:
            return None
        return next((failure for failure in self.evidence.failures if failure.rank == self.verdict.rank), None)


def cause_line(findings: Findings) -> str:
    """Return the root cause in one line."""
    verdict, cause = findings.verdict, findings.cause
    if cause is not None:
        return f"rank {cause.rank} on {cause.host}: {_kind(verdict)}{_summary(cause, verdict)}"
    where = ""
    if verdict.kind is Kind.NODE_FAILED and verdict.hosts:
        names = NodeNames(verdict.hosts)
        lost = [rank for rank, host in enumerate(findings.evidence.facts.hosts) if host in names]
        where = f"{', '.join(verdict.hosts)} ({rank_ranges(lost)}): " if lost else f"{', '.join(verdict.hosts)}: "
    elif verdict.rank is not None:
        where = f"rank {verdict.rank} on {_host(findings, verdict.rank)}: "
    elif verdict.hosts:
        where = f"{', '.join(verdict.hosts)}: "
    if verdict.waiting and verdict.kind is Kind.COLLECTIVE_TIMEOUT:
        return (f"{rank_ranges(verdict.ranks)} on {', '.join(verdict.hosts)} did not join a collective in which"
                f" {rank_ranges(verdict.waiting)} timed out")
    if verdict.kind in (Kind.ENDED_EARLY, Kind.IDLE, Kind.TERMINATED, Kind.LAUNCHER):
        return verdict.evidence
    if verdict.kind is Kind.VANISHED:
        names = NodeNames(verdict.hosts)
        absent = [rank for rank in findings.evidence.absent if _host(findings, rank) in names]
        return (f"{rank_ranges(absent)} on {', '.join(verdict.hosts)}: {verdict.kind.value},"
                f" {_last_report(findings, absent[0])}")
    return f"{where}{_kind(verdict)}{_short(verdict.evidence)}"


def as_text(findings: Findings, with_lines: bool = True) -> str:
    """Format the post-mortem, with or without the last lines of a rank's output."""
    lines = [_first_line(findings), *_cause_lines(findings, with_lines)]
    lines += [f"  {line}" for line in (*_other_failures(findings), *_absent(findings), *_behind(findings))]
    lines += [f"  {match.source}: {_short(match.text)}" for match in _messages_to_show(findings)]
    if findings.advice:
        lines.append(f"  try: {to_typable_text(findings.advice)}")
    if findings.resume and "--resume" not in (findings.advice or ""):
        lines.append(f"  resume: {to_typable_text(findings.resume)}")
    # A hostname or reason from another user's run.json could contain a newline and forge a line of launch.
    return "\n".join(line.replace("\n", " ") for line in lines)


def as_details(findings: Findings) -> dict[str, object]:
    """Return the post-mortem as JSON values."""
    verdict = findings.verdict
    return {
        "evidence": verdict.evidence,
        "hosts": list(verdict.hosts),
        "failure_text": verdict.text,
        "only": verdict.only,
        "ranks": list(verdict.ranks),
        "waiting": list(verdict.waiting),
        "record": asdict(findings.cause) if findings.cause else None,
        "followers": [{"ranks": ranks, "what": description} for description, ranks in _groups(findings).items()],
        "absent": list(findings.evidence.absent),
        "said": [{"who": match.source, "means": match.kind, "words": match.text, "host": match.host,
                  "ranks": match.ranks, "code": match.code} for match in findings.evidence.log_matches],
        "try": findings.advice,
        "resume": findings.resume,
    }


def _first_line(findings: Findings) -> str:
    cause, verdict = findings.cause, findings.verdict
    if cause is None:
        return f"launch: {cause_line(findings)}"
    doing = f", in {_doing(cause.phase, cause.step)}" if cause.phase else ""
    return (f"launch: rank {cause.rank} on {cause.host} failed: {_kind(verdict)}{cause.how}, after"
            f" {cause.duration_s:.1f} s{doing}")


def _cause_lines(findings: Findings, with_lines: bool) -> list[str]:
    cause, verdict = findings.cause, findings.verdict
    if cause is None:
        lines = [f"  {_short(verdict.evidence)}"] if verdict.kind is Kind.COLLECTIVE_TIMEOUT else []
        if findings.lines and with_lines:
            if verdict.waiting:
                lines.append(f"  last lines of the log of rank {findings.lines_of}:")
            elif verdict.rank is None:
                lines.append("  last lines of the most recent log:")
            lines += [f"  | {line}" for line in collapse_similar_lines(findings.lines)]
        return lines
    lines = []
    if cause.exception is not None:
        lines.append(f"  {_short(_error_line(cause, cause.exception, verdict))}"
                     + (f"  ({cause.exception.where})" if cause.exception.where else ""))
        if cause.exception.caused_by:
            lines.append(f"  caused by {_short(cause.exception.caused_by)}")
    elif verdict.evidence and verdict.evidence not in (cause.signal, cause.oom_killed):
        label = "" if verdict.cause else "last output: "
        lines.append(f"  {label}{_short(verdict.evidence)}")
    if verdict.evidence in (cause.signal, cause.exception and cause.exception.line):
        lines += [f"  printed before that: {_short(line)}" for line in error_line_before_crash(cause)]
    if cause.oom_killed:
        lines.append(f"  {cause.oom_killed}")
    if with_lines:
        lines += [f"  | {line}" for line in collapse_similar_lines(cause.tail)] or ["  (no output)"]
    lines.append(f"  log: {findings.run_dir.rank_log(cause.rank)}")
    return lines


def collapse_similar_lines(lines: Sequence[str]) -> list[str]:
    """Collapse runs of lines that differ only in numbers, such as a loss table, to their last line."""
    collapsed: list[str] = []
    for _, run in itertools.groupby(lines, lambda line: _NUMBERS.sub("#", line)):
        alike = list(run)
        if len(alike) > _MAX_SIMILAR:
            collapsed.append(f"… {len(alike) - 1} lines like this one:")
            alike = alike[-1:]
        collapsed += alike
    return collapsed


def _other_failures(findings: Findings) -> list[str]:
    lines = []
    groups = sorted(_groups(findings).items(), key=lambda group: -len(group[1]))
    for description, ranks in groups[:_OTHERS_SHOWN]:
        if description == "the same":
            lines.append(f"{rank_ranges(ranks)}: the same")
        else:
            lines.append(f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}: {description}: {fold_numbers(ranks)}")
    if len(groups) > _OTHERS_SHOWN:
        lines.append(f"… and {len(groups) - _OTHERS_SHOWN} other kinds of failure (see {findings.run_dir.errors})")
    return lines


def _groups(findings: Findings) -> dict[str, list[int]]:
    """Group the other failed ranks by description."""
    cause, by_rank = findings.cause, findings.evidence.findings
    same = _signature(cause, by_rank[cause.rank]) if cause else None
    groups = group_by_key((_signature(failure, by_rank[failure.rank]), failure)
                          for failure in findings.evidence.failures if failure is not cause)
    of_records = [("the same" if signature == same else _describe(alike[0], by_rank[alike[0].rank]), failure.rank)
                  for signature, alike in groups.items() for failure in alike]
    # In a large world, ranks that were ended by others write no records; only their nodes report them.
    recorded = {failure.rank for failure in findings.evidence.failures}
    of_reports = [(f"exit code {report.ended}, reported by the node", rank)
                  for rank, report in findings.reports.items() if report.ended and rank not in recorded]
    return group_by_key([*of_reports, *of_records])


def _signature(failure: Failure, finding: Finding) -> tuple[object, ...]:
    """Return a key that is equal for ranks that failed alike; numbers (ranks, ports, bytes) are ignored."""
    if finding.kind in FOLLOWERS:
        return (finding.kind, _describe(failure, finding))
    where = failure.exception.where if failure.exception else None
    return (finding.kind, failure.exit_code, _NUMBER.sub("#", finding.evidence), where)


def _describe(failure: Failure, finding: Finding) -> str:
    if finding.kind is Kind.PEER_LOST:
        return f"{finding.kind.value} ({summarize_lost_peer(finding.evidence)})"
    if finding.kind is Kind.TERMINATED:
        return f"{finding.kind.value} ({finding.evidence})"
    if finding.kind in FOLLOWERS:
        return finding.kind.value
    if finding.kind is Kind.EXIT or finding.evidence == failure.signal:
        return failure.how
    return f"{failure.how}: {_short(finding.evidence)}"


def _absent(findings: Findings) -> list[str]:
    """List ranks without a record by node, with their last reported phase and step."""
    if any(match.kind == log_kinds.ABORTED and match.text == findings.verdict.evidence
           for match in findings.evidence.log_matches):
        # MPI_Abort kills all ranks before they can leave a record, so that missing records mean nothing.
        return []
    by_node = group_by_key((_host(findings, rank), rank) for rank in findings.evidence.absent)
    return [f"no record: {rank_ranges(ranks)} on {host}, {_last_report(findings, ranks[0])}"
            for host, ranks in list(by_node.items())[:_OTHERS_SHOWN]]


def _last_report(findings: Findings, rank: int) -> str:
    report = findings.reports.get(rank)
    if report is None:
        return "never reported"
    return f"last reported in {_doing(report.phase, report.step)}" if report.phase else "no heartbeats"


def _behind(findings: Findings) -> list[str]:
    """Describe the ranks at the lowest step of a hang: the others waited for these."""
    if findings.verdict.kind not in (Kind.COLLECTIVE_TIMEOUT, Kind.IDLE):
        return []
    steps = {rank: report.step for rank, report in findings.reports.items() if report.step is not None}
    low, high = (min(steps.values()), max(steps.values())) if steps else (0, 0)
    slow = [rank for rank, step in steps.items() if step == low]
    if low == high:
        return []
    return [f"behind the others: {rank_ranges(slow)} on {_host(findings, slow[0])}, at step {low}"
            f" (others reached step {high})"]


def _messages_to_show(findings: Findings) -> list[log_patterns.LogMatch]:
    """Return the scheduler's and launcher's messages; those about single ranks only if no rank left a record."""
    has_records = bool(findings.evidence.failures)
    messages = [match for match in findings.evidence.log_matches
                if not (has_records and match.kind == log_kinds.ENDED)
                and match.kind != log_kinds.STEP_CANCELLED
                and match.text != findings.verdict.evidence]
    return messages[:_MESSAGES_SHOWN]


def _kind(verdict: Verdict) -> str:
    label = verdict.cause or ("" if verdict.kind in _PLAIN else verdict.kind.value)
    text = ", ".join(part for part in (label, verdict.only) if part)
    return f"{text}: " if text else ""


def _summary(cause: Failure, verdict: Verdict) -> str:
    if cause.exception is not None and verdict.kind is not Kind.OOM_KILLED:
        return f"{_short(_error_line(cause, cause.exception, verdict))} ({cause.how})"
    return f"{_short(verdict.evidence)} ({cause.how})" if verdict.cause and verdict.evidence else cause.how


def _error_line(cause: Failure, raised: Raised, verdict: Verdict) -> str:
    """Return the exception's line; for a crash, the earlier output if that showed the cause.

    faulthandler only reports where a crash happened.
    """
    is_from_output = has_crashed(cause) and verdict.evidence not in ("", cause.signal)
    return verdict.evidence if is_from_output else raised.line


def _doing(phase: str | None, step: int | None) -> str:
    parts = [phase] if phase else []
    if step is not None:
        parts.append(f"step {step}")
    return ", ".join(parts) if parts else "an unnamed phase"


def _host(findings: Findings, rank: int) -> str:
    hosts = findings.evidence.facts.hosts
    return hosts[rank] if rank < len(hosts) else "an unknown node"


def _short(text: str) -> str:
    return text if len(text) <= _EVIDENCE_CHARACTERS else f"{text[:_EVIDENCE_CHARACTERS]}…"
