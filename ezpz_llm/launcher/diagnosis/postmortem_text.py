"""Text of the post-mortem: the root cause, then its consequences in groups, and advice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ezpz_llm.core.base import group_by_key
from ezpz_llm.core.base.shell_commands import to_typable_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics import log_kinds
from ezpz_llm.launcher.basics.hostlist import fold_numbers, rank_ranges
from ezpz_llm.launcher.basics.hostnames import NodeNames
from ezpz_llm.launcher.basics.messages import RankReport
from ezpz_llm.launcher.diagnosis import log_patterns
from ezpz_llm.launcher.diagnosis.classify import Finding, error_line_before_crash, has_crashed, summarize_lost_peer
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, Verdict
from ezpz_llm.launcher.on_nodes.kinds import CONSEQUENCE_KINDS, Kind
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised

_EVIDENCE_CHARACTERS = 300
_OTHERS_SHOWN = 8
_MESSAGES_SHOWN = 4
_MAX_SIMILAR = 3
_NUMBERS = re.compile(r"(?:[\s+-]{,40}\d[\d.,]*(?:e[+-]?\d+)?)+")
_NUMBER = re.compile(r"\d+")
_KINDS_WITHOUT_LABEL = (Kind.SIGNAL, Kind.EXIT, Kind.EXCEPTION)


@dataclass(frozen=True)
class Content:
    """Content of the post-mortem.

    Attributes:
        lines: the last lines of the output of rank `lines_of`.
        resume: the command that resumes from the last checkpoint, if there is one.
        difference: the first collective in which hanging ranks differ, if they have records.
    """

    run_dir: RunDir
    evidence: Evidence
    verdict: Verdict
    reports: Mapping[int, RankReport]
    lines_of: int | None
    lines: Sequence[str]
    advice: str | None
    resume: str | None = None
    difference: str | None = None

    @property
    def cause(self) -> Failure | None:
        """Record of the rank that caused the failure; None if the cause is not a single rank with a record."""
        if self.verdict.waiting:
            return None
        return next((failure for failure in self.evidence.failures if failure.rank == self.verdict.rank), None)


def cause_line(content: Content) -> str:
    """Return the root cause in one line."""
    verdict, cause = content.verdict, content.cause
    if cause is not None:
        return f"rank {cause.rank} on {cause.host}: {_kind_label(verdict)}{_cause_summary(cause, verdict)}"
    where = ""
    if verdict.kind is Kind.NODE_FAILED and verdict.hosts:
        names = NodeNames(verdict.hosts)
        lost = [rank for rank, host in enumerate(content.evidence.facts.hosts) if host in names]
        where = f"{', '.join(verdict.hosts)} ({rank_ranges(lost)}): " if lost else f"{', '.join(verdict.hosts)}: "
    elif verdict.rank is not None:
        where = f"rank {verdict.rank} on {_host(content, verdict.rank)}: "
    elif verdict.hosts:
        where = f"{', '.join(verdict.hosts)}: "
    if verdict.waiting and verdict.kind is Kind.COLLECTIVE_TIMEOUT:
        return (f"{rank_ranges(verdict.ranks)} on {', '.join(verdict.hosts)} did not join a collective in which"
                f" {rank_ranges(verdict.waiting)} timed out")
    if verdict.kind in (Kind.ENDED_EARLY, Kind.IDLE, Kind.TERMINATED, Kind.LAUNCHER, Kind.COLLECTIVE_TIMEOUT):
        return verdict.evidence
    if verdict.kind is Kind.VANISHED:
        names = NodeNames(verdict.hosts)
        absent = [rank for rank in content.evidence.absent if _host(content, rank) in names]
        return (f"{rank_ranges(absent)} on {', '.join(verdict.hosts)}: {verdict.kind.value},"
                f" {_last_report(content, absent[0])}")
    return f"{where}{_kind_label(verdict)}{_shorten(verdict.evidence)}"


def as_text(content: Content, with_lines: bool = True) -> str:
    """Format the post-mortem, with or without the last lines of a rank's output."""
    lines = [_first_line(content), *([f"  {content.difference}"] if content.difference else []),
             *_cause_lines(content, with_lines)]
    lines += [f"  {line}" for line in (*_other_failures(content), *_absent_lines(content), *_ranks_behind(content))]
    lines += [f"  {match.source}: {_shorten(match.text)}" for match in _messages_to_show(content)]
    if content.advice:
        lines.append(f"  try: {to_typable_text(content.advice)}")
    if content.resume and str(content.run_dir.path) not in (content.advice or ""):
        lines.append(f"  resume: {to_typable_text(content.resume)}")
    # A hostname or reason from another user's run.json could contain a newline and forge a line of launch's output.
    return "\n".join(line.replace("\n", " ") for line in lines)


def as_details(content: Content) -> dict[str, object]:
    """Return the post-mortem as JSON values."""
    verdict = content.verdict
    return {
        "evidence": verdict.evidence,
        "hosts": list(verdict.hosts),
        "failure_text": verdict.text,
        "only": verdict.only,
        "ranks": list(verdict.ranks),
        "waiting": list(verdict.waiting),
        "collectives": content.difference,
        "record": asdict(content.cause) if content.cause else None,
        "followers": [{"ranks": ranks, "what": description}
                      for description, ranks in _group_failures(content).items()],
        "absent": list(content.evidence.absent),
        "said": [{"who": match.source, "means": match.kind, "words": match.text, "host": match.host,
                  "ranks": match.ranks, "code": match.code} for match in content.evidence.log_matches],
        "try": content.advice,
        "resume": content.resume,
    }


def _first_line(content: Content) -> str:
    cause, verdict = content.cause, content.verdict
    if cause is None:
        return f"launch: {cause_line(content)}"
    doing = f", in {_phase_and_step(cause.phase, cause.step)}" if cause.phase else ""
    return (f"launch: rank {cause.rank} on {cause.host} failed: {_kind_label(verdict)}{cause.exit_text}, after"
            f" {cause.duration_s:.1f} s{doing}")


def _cause_lines(content: Content, with_lines: bool) -> list[str]:
    cause, verdict = content.cause, content.verdict
    if cause is None:
        is_quoted = verdict.waiting and verdict.kind is Kind.COLLECTIVE_TIMEOUT
        lines = [f"  {_shorten(verdict.evidence)}"] if is_quoted else []
        if content.lines and with_lines:
            if verdict.waiting:
                lines.append(f"  last lines of the log of rank {content.lines_of}:")
            elif verdict.rank is None:
                lines.append("  last lines of the most recent log:")
            lines += [f"  | {line}" for line in _collapse_similar_lines(content.lines)]
        return lines
    lines = []
    if cause.exception is not None:
        error = _shorten(_error_line(cause, cause.exception, verdict))
        if cause.exception.caused_by:
            error += f"; caused by {_shorten(cause.exception.caused_by)}"
        lines.append(f"  {error}" + (f"  ({cause.exception.where})" if cause.exception.where else ""))
    elif verdict.evidence and verdict.evidence not in (cause.signal, cause.oom_killed):
        label = "" if verdict.cause else "last output: "
        lines.append(f"  {label}{_shorten(verdict.evidence)}")
    if verdict.evidence in (cause.signal, cause.exception and cause.exception.line):
        lines += [f"  printed before that: {_shorten(line)}" for line in error_line_before_crash(cause)]
    if cause.oom_killed:
        lines.append(f"  {cause.oom_killed}")
    if with_lines and cause.tail != (verdict.evidence,):
        lines += [f"  | {line}" for line in _collapse_similar_lines(cause.tail)] or ["  (no output)"]
    lines.append(f"  log: {content.run_dir.rank_log(cause.rank)}")
    return lines


def _collapse_similar_lines(lines: Sequence[str]) -> list[str]:
    """Collapse runs of lines that differ only in numbers, such as a loss table, to their last line."""
    collapsed: list[str] = []
    for _, run in itertools.groupby(lines, lambda line: _NUMBERS.sub("#", line)):
        alike = list(run)
        if len(alike) > _MAX_SIMILAR:
            collapsed.append(f"… {len(alike) - 1} lines like this one:")
            alike = alike[-1:]
        collapsed += alike
    return collapsed


def _other_failures(content: Content) -> list[str]:
    lines = []
    groups = sorted(_group_failures(content).items(), key=lambda group: -len(group[1]))
    for description, ranks in groups[:_OTHERS_SHOWN]:
        if description == "the same":
            lines.append(f"{rank_ranges(ranks)}: the same")
        else:
            lines.append(f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}: {description}: {fold_numbers(ranks)}")
    if len(groups) > _OTHERS_SHOWN:
        lines.append(f"… and {len(groups) - _OTHERS_SHOWN} other kinds of failure (see {content.run_dir.errors})")
    return lines


def _group_failures(content: Content) -> dict[str, list[int]]:
    """Group the other failed ranks by description."""
    cause, by_rank = content.cause, content.evidence.findings
    same = _signature(cause, by_rank[cause.rank]) if cause else None
    groups = group_by_key((_signature(failure, by_rank[failure.rank]), failure)
                          for failure in content.evidence.failures if failure is not cause)
    of_records = [("the same" if signature == same else _describe(alike[0], by_rank[alike[0].rank]), failure.rank)
                  for signature, alike in groups.items() for failure in alike]
    # Above 256 ranks, only one rank per node writes a record if all are ended; the nodes report the other ranks.
    recorded = {failure.rank for failure in content.evidence.failures}
    of_reports = [(f"exit code {report.ended}, reported by the node", rank)
                  for rank, report in content.reports.items() if report.ended and rank not in recorded]
    return group_by_key([*of_reports, *of_records])


def _signature(failure: Failure, finding: Finding) -> tuple[object, ...]:
    """Return a key that is equal for ranks that failed alike; numbers (ranks, ports, bytes) are ignored."""
    if finding.kind in CONSEQUENCE_KINDS:
        return (finding.kind, _describe(failure, finding))
    where = failure.exception.where if failure.exception else None
    return (finding.kind, failure.exit_code, _NUMBER.sub("#", finding.evidence), where)


def _describe(failure: Failure, finding: Finding) -> str:
    if finding.kind is Kind.PEER_LOST:
        return f"{finding.kind.value} ({summarize_lost_peer(finding.evidence)})"
    if finding.kind is Kind.TERMINATED:
        return f"{finding.kind.value} ({finding.evidence})"
    if finding.kind in CONSEQUENCE_KINDS:
        return finding.kind.value
    if finding.kind is Kind.EXIT or finding.evidence == failure.signal:
        return failure.exit_text
    return f"{failure.exit_text}: {_shorten(finding.evidence)}"


def _absent_lines(content: Content) -> list[str]:
    """List ranks without a record by node, with their last reported phase and step."""
    if any(match.kind == log_kinds.ABORTED and match.text == content.verdict.evidence
           for match in content.evidence.log_matches):
        # MPI_Abort kills all ranks before they can leave a record, so that missing records mean nothing.
        return []
    by_node = group_by_key((_host(content, rank), rank) for rank in content.evidence.absent)
    return [f"no record: {rank_ranges(ranks)} on {host}, {_last_report(content, ranks[0])}"
            for host, ranks in list(by_node.items())[:_OTHERS_SHOWN]]


def _last_report(content: Content, rank: int) -> str:
    report = content.reports.get(rank)
    if report is None:
        return "never reported"
    return f"last reported in {_phase_and_step(report.phase, report.step)}" if report.phase else "no heartbeats"


def _ranks_behind(content: Content) -> list[str]:
    """Describe the ranks at the lowest step in a hang, for which the other ranks waited."""
    if content.verdict.kind not in (Kind.COLLECTIVE_TIMEOUT, Kind.IDLE):
        return []
    steps = {rank: report.step for rank, report in content.reports.items() if report.step is not None}
    low, high = (min(steps.values()), max(steps.values())) if steps else (0, 0)
    slow = [rank for rank, step in steps.items() if step == low]
    if low == high:
        return []
    return [f"behind the others: {rank_ranges(slow)} on {_host(content, slow[0])}, at step {low}"
            f" (others reached step {high})"]


def _messages_to_show(content: Content) -> list[log_patterns.LogMatch]:
    """Return the scheduler's and launcher's messages; those about single ranks only if no rank left a record."""
    has_records = bool(content.evidence.failures)
    messages = [match for match in content.evidence.log_matches
                if not (has_records and match.kind == log_kinds.ENDED)
                and match.kind not in (log_kinds.STEP_CANCELLED, log_kinds.STEP_ENDED)
                and match.text != content.verdict.evidence]
    return messages[:_MESSAGES_SHOWN]


def _kind_label(verdict: Verdict) -> str:
    label = verdict.cause or ("" if verdict.kind in _KINDS_WITHOUT_LABEL else verdict.kind.value)
    text = ", ".join(part for part in (label, verdict.only) if part)
    return f"{text}: " if text else ""


def _cause_summary(cause: Failure, verdict: Verdict) -> str:
    if cause.exception is not None and verdict.kind is not Kind.OOM_KILLED:
        return f"{_shorten(_error_line(cause, cause.exception, verdict))} ({cause.exit_text})"
    has_cause = verdict.cause and verdict.evidence
    return f"{_shorten(verdict.evidence)} ({cause.exit_text})" if has_cause else cause.exit_text


def _error_line(cause: Failure, raised: Raised, verdict: Verdict) -> str:
    """Return the line of the exception; for a crash, an earlier line of output if it showed the cause.

    faulthandler reports only where a crash happened.
    """
    is_from_output = has_crashed(cause) and verdict.evidence not in ("", cause.signal)
    return verdict.evidence if is_from_output else raised.line


def _phase_and_step(phase: str | None, step: int | None) -> str:
    parts = [phase] if phase else []
    if step is not None:
        parts.append(f"step {step}")
    return ", ".join(parts) if parts else "an unnamed phase"


def _host(content: Content, rank: int) -> str:
    hosts = content.evidence.facts.hosts
    return hosts[rank] if rank < len(hosts) else "an unknown node"


def _shorten(text: str) -> str:
    return text if len(text) <= _EVIDENCE_CHARACTERS else f"{text[:_EVIDENCE_CHARACTERS]}…"
