"""Choice of a run's root cause: a pure function from the evidence to a verdict.

Causes and consequences are distinguished by the ranks' output, never by clocks alone, which differ between nodes.
The time limit is recognized by the scheduler's message or by the clock, never by an exit code (143 has many
causes).
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ezpz_llm.core.base import EXIT_IDLE, EXIT_PREFLIGHT
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics import log_kinds
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.basics.hostnames import NodeNames, is_same_node
from ezpz_llm.launcher.diagnosis.classify import Finding, classify
from ezpz_llm.launcher.diagnosis.differences import Frame, find_blocking_ranks, last_calls
from ezpz_llm.launcher.diagnosis.liveness import UNUSUAL_STATES
from ezpz_llm.launcher.diagnosis.log_patterns import LogMatch
from ezpz_llm.launcher.on_nodes.kinds import CONSEQUENCE_KINDS, Kind
from ezpz_llm.launcher.on_nodes.known_failures import FailureText, fill_advice, find_text, shipped_texts
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised, RunFacts

_NEAR_LIMIT_S = 60.0
"""Slurm checks time limits every 30 s and rounds them to minutes; PBS enforces them late rather than early."""

_SCHEDULER_KINDS = {
    log_kinds.TIME_LIMIT: Kind.TIME_LIMIT, log_kinds.PREEMPTED: Kind.PREEMPTED,
    log_kinds.REQUEUED: Kind.REQUEUED,
    log_kinds.CANCELLED: Kind.CANCELLED,
}
_SIGTERM = 15


@dataclass(frozen=True)
class Verdict:
    """Root cause of a run's end.

    Attributes:
        code: launch's exit code.
        ranks: the ranks that `waiting` waited for, if no rank failed by itself.
        only: "on HOSTS only", if all ranks on these nodes failed this way and no other rank did.
        cause, advice: from the known failure text named `text` (see `Finding`); empty if none matched.
    """

    code: int
    kind: Kind
    evidence: str
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    only: str = ""
    cause: str = ""
    advice: str = ""
    text: str = ""


_NODE_DEPENDENT_KINDS = (Kind.MISSING_MODULE, Kind.NOT_FOUND, Kind.DISK_FULL)
"""Kinds that every rank would show if the program caused them. If only some ranks do, their nodes are suspect."""

_EXTERNAL_SIGNALS = ("SIGTERM", "SIGKILL", "SIGINT", "SIGHUP")
_LAUNCH_KILLED = Verdict(128 + signal.SIGKILL, Kind.LAUNCHER, "launch itself was killed, and its ranks with it",
                         advice="look for the reason on launch's node: dmesg (out of memory), or a limit of the"
                                " login node on processes")


@dataclass(frozen=True)
class Evidence:
    """All evidence about a run's end.

    Attributes:
        failures: the records of failed ranks, earliest first.
        log_matches: messages of the launcher and the scheduler.
        absent: ranks without a record whose end no node reported, except on nodes that launch had cleaned up.
        in_logs: exceptions from the logs of ranks without a record.
        silent: nodes that have not reported the end of their ranks, although other nodes have.
        ended_early: lifetimes in seconds of ranks that ended with code 0 before launch ended the run.
        stacks: stacks of silent ranks, outermost call first.
        exiting: exceptions that end the logs of silent ranks without a stack, which hang in exit handlers.
        in_threads: exceptions of threads or child processes that end the logs of ranks that launch ended.
    """

    failures: tuple[Failure, ...]
    log_matches: tuple[LogMatch, ...]
    facts: RunFacts
    absent: tuple[int, ...] = ()
    in_logs: Mapping[int, Raised] | None = None
    silent: tuple[str, ...] = ()
    ended_early: Mapping[int, float] = field(default_factory=dict)
    texts: tuple[FailureText, ...] = field(default_factory=shipped_texts)
    stacks: Mapping[int, Sequence[Frame]] = field(default_factory=dict)
    exiting: Mapping[int, Raised] = field(default_factory=dict)
    in_threads: Mapping[int, Raised] = field(default_factory=dict)

    @functools.cached_property
    def findings(self) -> dict[int, Finding]:
        """Classified records, by rank."""
        return {failure.rank: classify(failure, self.texts) for failure in self.failures}


def find_root_cause(evidence: Evidence) -> Verdict | None:
    """Return the root cause of a run's end, or None if the run succeeded."""
    facts = evidence.facts
    if not evidence.failures and facts.stopped is None and facts.launcher_status == 0:
        return _from_clean_exit(evidence)
    for rule in (_from_failed_rank, _from_scheduler, _from_lost_node, _from_abort, _from_launch, _from_consequence,
                 _from_launcher, _from_silent_node):
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    if facts.launcher_status is None:
        return _LAUNCH_KILLED
    code = _launcher_code(facts)
    by = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
    return Verdict(code, Kind.LAUNCHER, f"{facts.launcher} ended with code {code}{by}, and no rank left a record")


def _from_clean_exit(evidence: Evidence) -> Verdict | None:
    """Return the scheduler's reason for ending a run whose ranks all ended with code 0.

    None if the scheduler did not end it. Ranks may handle the scheduler's signal, save and exit with code 0, but
    the run is then not finished. In an salloc shell launch itself gets no signal.
    """
    return next((_from_message(match, 128 + _SIGTERM) for match in evidence.log_matches
                 if match.kind in _SCHEDULER_KINDS or match.kind == log_kinds.STEP_CANCELLED), None)


def _from_message(match: LogMatch, code: int) -> Verdict:
    kind = _SCHEDULER_KINDS.get(match.kind, Kind.CANCELLED)
    return Verdict(code, kind, match.text,
                   cause="the job or its step was canceled" if match.kind == log_kinds.STEP_CANCELLED else "")


def _from_failed_rank(evidence: Evidence) -> Verdict | None:
    """Blame the earliest rank that failed by itself before launch began to end the run."""
    before_stop = evidence.facts.failed_before_stop
    causes = [failure for failure in evidence.failures
              if evidence.findings[failure.rank].kind not in CONSEQUENCE_KINDS
              and (before_stop is None or failure.rank in before_stop)]
    if _from_scheduler(evidence) is not None or _from_lost_node(evidence) is not None:
        # A scheduler that ends a job or a step also signals ranks directly.
        causes = [failure for failure in causes if failure.signal not in _EXTERNAL_SIGNALS
                  or evidence.findings[failure.rank].kind is Kind.OOM_KILLED]
    return _rank_verdict(causes[0], evidence) if causes else None


def _from_scheduler(evidence: Evidence) -> Verdict | None:
    facts = evidence.facts
    for match in evidence.log_matches:
        if match.kind in _SCHEDULER_KINDS:
            return _from_message(match, _external_code(evidence))
    if (canceled := _canceled_step(evidence)) is not None:
        return canceled
    launch_signalled = facts.stopped is not None and facts.stopped.kind == "signal"
    terminated = [finding for finding in evidence.findings.values() if finding.kind is Kind.TERMINATED]
    if (launch_signalled or terminated) and facts.ends_at is not None:
        remaining_s = facts.ends_at - facts.ended
        if remaining_s <= _NEAR_LIMIT_S:
            when = f"{remaining_s:.0f} s before" if remaining_s > 0 else f"{-remaining_s:.0f} s after"
            return Verdict(_external_code(evidence), Kind.TIME_LIMIT,
                           f"ended by {_external_signal(evidence)} {when} the job's end time")
    return None


def _canceled_step(evidence: Evidence) -> Verdict | None:
    """Return the end of a step that neither launch nor the launcher ended, for example by scancel JOB.STEP."""
    facts, matches = evidence.facts, evidence.log_matches
    if facts.stopped is not None or any(match.kind in (log_kinds.STEP_ENDED, log_kinds.NODE_FAILED)
                                        for match in matches):
        return None
    for match in matches:
        if match.kind == log_kinds.STEP_CANCELLED:
            return _from_message(match, _external_code(evidence))
    killed = [match for match in matches if match.kind == log_kinds.ENDED and match.code == 128 + signal.SIGKILL]
    if (not evidence.failures and len(set(facts.hosts)) > 1
            and {rank for match in killed for rank in match.ranks}.issuperset(range(facts.world_size))):
        # As scancel --signal=KILL does. A kernel that runs out of memory kills processes of one node.
        return Verdict(_external_code(evidence), Kind.CANCELLED, killed[0].text,
                       cause="all ranks were killed at once, on all nodes")
    return None


def _from_lost_node(evidence: Evidence) -> Verdict | None:
    matches = [match for match in evidence.log_matches if match.kind == log_kinds.NODE_FAILED]
    hosts = tuple(dict.fromkeys(match.host for match in matches if match.host))
    if matches:
        lost = NodeNames(hosts)
        ranks = [rank for rank, host in enumerate(evidence.facts.hosts) if host in lost]
        text = next((match.text for match in matches if match.host), matches[0].text)
        return Verdict(_code_without_record(evidence), Kind.NODE_FAILED, text,
                       ranks[0] if ranks else None, hosts)
    return None


def _from_abort(evidence: Evidence) -> Verdict | None:
    """Blame a rank that MPI_Abort or the launcher killed before its shim could write a record."""
    for match in evidence.log_matches:
        if match.kind == log_kinds.ABORTED and match.ranks:
            return Verdict(match.code or 1, Kind.EXIT, match.text, match.ranks[0])
    if evidence.in_logs and not evidence.findings:
        rank = min(evidence.in_logs)
        return Verdict(_code_without_record(evidence), Kind.EXCEPTION, evidence.in_logs[rank].line, rank)
    return None


def _from_launch(evidence: Evidence) -> Verdict | None:
    """Return launch's own reason for ending the run: a signal, a hang, or a rank that did not start."""
    stopped = evidence.facts.stopped
    if stopped is None or stopped.kind == "rank":
        return None
    if stopped.kind == "idle":
        early = _early_exit(EXIT_IDLE, evidence)
        if early is not None:
            return Verdict(EXIT_IDLE, Kind.IDLE, f"{early.evidence}; {stopped.text}")
        return _from_hang(stopped, evidence)
    if stopped.kind in ("refused", "late"):
        code = EXIT_PREFLIGHT if stopped.kind == "refused" else EXIT_IDLE
        is_wrong_world = any(match.kind == log_kinds.WRONG_WORLD for match in evidence.log_matches)
        return Verdict(code, Kind.WRONG_WORLD if is_wrong_world else Kind.NOT_STARTED, stopped.text,
                       hosts=_hosts(evidence.facts, evidence.absent))
    return Verdict(_external_code(evidence), Kind.TERMINATED, stopped.text)


def _from_hang(stopped: Stop, evidence: Evidence) -> Verdict:
    """Explain a hang by what the silent ranks wait for, if their stacks show a known wait.

    A rank that is stopped, or waits for a device or a file system, already explains why other ranks wait.
    """
    ranks, places = find_blocking_ranks(evidence.stacks)
    description = stopped.text if not places or places in stopped.text else f"{stopped.text}; {places}"
    waits = [find_text(evidence.texts, last_calls(evidence.stacks[rank])) for rank in ranks]
    first = waits[0] if waits else None
    is_explained = any(state in stopped.text for state in UNUSUAL_STATES.values())
    if not is_explained and (survived := _from_survived_exception(EXIT_IDLE, Kind.IDLE, stopped.text, evidence)):
        return survived
    if first is None or is_explained or any(wait is None or wait[0] is not first[0] for wait in waits):
        return Verdict(EXIT_IDLE, Kind.IDLE, description)
    text, _, match = first
    return Verdict(EXIT_IDLE, Kind.IDLE, f"{rank_ranges(ranks)}: {text.cause}: {description}",
                   hosts=_hosts(evidence.facts, ranks), cause=text.cause,
                   advice=fill_advice(text.advice, match.groupdict()), text=text.name)


def _from_survived_exception(code: int, kind: Kind, consequence: str, evidence: Evidence) -> Verdict | None:
    """Blame an exception after which a rank did not end.

    Its main thread waits for a thread or child process that has ended, or its exit handlers, such as MPI_Finalize,
    wait for other ranks. The loss of a peer is not blamed: ranks lose their peers when launch ends the run.
    """
    for what, exceptions in ((": a thread or child process ended with", evidence.in_threads),
                             (" did not exit after an exception:", evidence.exiting)):
        for rank, raised in sorted(exceptions.items()):
            known = find_text(evidence.texts, [raised.printed_line, *raised.message.split("\n")[1:],
                                               raised.caused_by or ""])
            if known is not None and known[0].kind is Kind.PEER_LOST:
                continue
            host = _host(evidence.facts, rank)
            description = f"rank {rank} on {host}{what} {raised.line}; {consequence}"
            if known is None:
                return Verdict(code, kind, description, hosts=(host,), cause=raised.line)
            text, _, match = known
            return Verdict(code, kind, description, hosts=(host,), cause=text.cause,
                           advice=fill_advice(text.advice, match.groupdict()), text=text.name)
    return None


def _from_consequence(evidence: Evidence) -> Verdict | None:
    """Find the cause if no rank failed by itself.

    Ranks that vanished, exited early or did not join a collective, else the first rank with such a consequence.
    """
    consequences = [failure for failure in evidence.failures
                    if evidence.findings[failure.rank].kind in CONSEQUENCE_KINDS]
    if not consequences:
        return None
    consequences.sort(key=lambda failure: CONSEQUENCE_KINDS.index(evidence.findings[failure.rank].kind))
    first = consequences[0]
    finding = evidence.findings[first.rank]
    if evidence.facts.launcher_status is None and finding.kind in (Kind.TERMINATED, Kind.STOPPED):
        return _LAUNCH_KILLED
    if evidence.absent and finding.kind in (Kind.PEER_LOST, Kind.COLLECTIVE_TIMEOUT):
        hosts = _hosts(evidence.facts, evidence.absent)
        return Verdict(_code_without_record(evidence), Kind.VANISHED, finding.evidence, evidence.absent[0],
                       hosts)
    if finding.kind in (Kind.PEER_LOST, Kind.COLLECTIVE_TIMEOUT):
        return (_early_exit(first.exit_code, evidence, min(failure.duration_s for failure in consequences))
                or _survived_exception_before_timeout(first, evidence)
                or _missing_in_collective(first, evidence) or _rank_verdict(first, evidence))
    return _rank_verdict(first, evidence)


def _early_exit(code: int, evidence: Evidence, before_s: float = float("inf")) -> Verdict | None:
    """Blame ranks that exited with code 0 while other ranks still needed them.

    torchrun ends the peers of a failed rank before launch does. Peers that handle its signal and end with code 0
    have outlived the failed rank, so that the limit `before_s` excludes them.
    """
    limit_s = before_s if evidence.facts.launcher == "torchrun" else float("inf")
    ranks = tuple(sorted(rank for rank, lived_s in evidence.ended_early.items() if lived_s <= limit_s))
    running_ranks = tuple(rank for rank in range(evidence.facts.world_size) if rank not in evidence.ended_early)
    if not ranks or not running_ranks:
        return None
    after_s = min(evidence.ended_early[rank] for rank in ranks)
    hosts = _hosts(evidence.facts, ranks)
    were = "was" if len(running_ranks) == 1 else "were"
    return Verdict(code, Kind.ENDED_EARLY,
                   f"{rank_ranges(ranks)} on {', '.join(hosts)} ended with code 0 after {after_s:.1f} s while"
                   f" {rank_ranges(running_ranks)} {were} still running", ranks[0], hosts, ranks, running_ranks)


def _survived_exception_before_timeout(first: Failure, evidence: Evidence) -> Verdict | None:
    waiting = [rank for rank, finding in evidence.findings.items() if finding.kind is Kind.COLLECTIVE_TIMEOUT]
    if not waiting:
        return None
    return _from_survived_exception(first.exit_code, Kind.COLLECTIVE_TIMEOUT,
                                    f"{rank_ranges(waiting)} timed out waiting for another rank", evidence)


def _missing_in_collective(first: Failure, evidence: Evidence) -> Verdict | None:
    """Blame the ranks that did not time out in a collective, if most ranks did."""
    waiting = tuple(sorted(rank for rank, finding in evidence.findings.items()
                           if finding.kind is Kind.COLLECTIVE_TIMEOUT))
    other_ranks = [rank for rank in range(evidence.facts.world_size) if rank not in waiting]
    # Ranks that lost a peer were usually in the collective as well.
    missing = [rank for rank in other_ranks if rank not in evidence.findings
               or evidence.findings[rank].kind is not Kind.PEER_LOST] or other_ranks
    if not 0 < len(missing) <= len(waiting):
        return None
    return Verdict(first.exit_code, Kind.COLLECTIVE_TIMEOUT, evidence.findings[first.rank].evidence, missing[0],
                   _hosts(evidence.facts, missing), tuple(missing), waiting,
                   advice=evidence.findings[first.rank].advice)


def _hosts(facts: RunFacts, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_host(facts, rank) for rank in ranks))


def _from_launcher(evidence: Evidence) -> Verdict | None:
    """Find the cause in the launcher's messages, if no rank left a record."""
    for log_kind, kind in ((log_kinds.MEMORY, Kind.OOM_KILLED), (log_kinds.WRONG_WORLD, Kind.WRONG_WORLD),
                           (log_kinds.NOT_STARTED, Kind.NOT_STARTED), (log_kinds.ENDED, Kind.UNRECORDED)):
        for match in evidence.log_matches:
            if match.kind == log_kind:
                hosts = (match.host,) if match.host else ()
                code = EXIT_PREFLIGHT if kind is Kind.NOT_STARTED else _launcher_code(evidence.facts)
                return Verdict(code, kind, match.text, match.ranks[0] if match.ranks else None, hosts)
    return None


def _from_silent_node(evidence: Evidence) -> Verdict | None:
    """Blame a node that stopped reporting when the launcher killed all ranks before they left a record."""
    silent = NodeNames(evidence.silent)
    lost_ranks = [rank for rank in evidence.absent if _host(evidence.facts, rank) in silent]
    if not lost_ranks or evidence.facts.launcher_status is None:
        return None
    return Verdict(_launcher_code(evidence.facts), Kind.VANISHED,
                   f"{', '.join(evidence.silent)} stopped reporting", lost_ranks[0], evidence.silent)


def _rank_verdict(failure: Failure, evidence: Evidence) -> Verdict:
    finding = evidence.findings[failure.rank]
    memory = [match.text for match in evidence.log_matches
              if match.kind == log_kinds.MEMORY
              and (match.host is None or is_same_node(match.host, failure.host))]
    if memory and failure.exit_code == 128 + signal.SIGKILL:
        finding = Finding(Kind.OOM_KILLED, memory[0])
    return Verdict(failure.exit_code, finding.kind, finding.evidence, failure.rank, (failure.host,),
                   only=_affected_nodes(finding, evidence), cause=finding.cause, advice=finding.advice,
                   text=finding.name)


def _affected_nodes(finding: Finding, evidence: Evidence) -> str:
    """Return "on HOSTS only" if all ranks of some nodes, and no others, failed this way; else "".

    With one rank per node this is reported only for kinds that depend on the node; other kinds require two ranks on
    a node.
    """
    failed_ranks, other_ranks = ranks_with_same_failure(finding.kind, finding.cause, evidence)
    hosts = _hosts(evidence.facts, failed_ranks)
    is_whole_nodes = other_ranks and set(hosts).isdisjoint(_hosts(evidence.facts, other_ranks))
    is_conclusive = finding.kind in _NODE_DEPENDENT_KINDS or len(failed_ranks) > len(hosts)
    return f"on {', '.join(hosts)} only" if is_whole_nodes and is_conclusive else ""


def ranks_with_same_failure(kind: Kind, cause: str, evidence: Evidence) -> tuple[list[int], list[int]]:
    """Return the ranks whose records show this kind and cause, and all other ranks."""
    failed_ranks = [rank for rank, finding in evidence.findings.items()
                    if finding.kind is kind and finding.cause == cause]
    return sorted(failed_ranks), [rank for rank in range(evidence.facts.world_size) if rank not in failed_ranks]


def _host(facts: RunFacts, rank: int) -> str:
    return facts.hosts[rank] if rank < len(facts.hosts) else "?"


def _external_signal(evidence: Evidence) -> str:
    if evidence.facts.stopped is not None and evidence.facts.stopped.signal:
        return evidence.facts.stopped.signal
    return next((failure.ended_by for failure in evidence.failures if failure.ended_by not in (None, "launch")),
                "SIGTERM")


def _external_code(evidence: Evidence) -> int:
    """Return 128 + the signal that launch received, else the first rank's code, else the launcher's."""
    stopped = evidence.facts.stopped
    if stopped is not None and stopped.signal:
        return 128 + signal.Signals[stopped.signal]
    return evidence.failures[0].exit_code if evidence.failures else _launcher_code(evidence.facts)


def _code_without_record(evidence: Evidence) -> int:
    """Return the launcher's code if it ended by itself, else the code of the first recorded rank."""
    if evidence.facts.stopped is None and evidence.facts.launcher_status:
        return _launcher_code(evidence.facts)
    return next((failure.exit_code for failure in evidence.failures), 1)


def _launcher_code(facts: RunFacts) -> int:
    status = facts.launcher_status
    if status is None:
        return 1
    # Ranks are missing, so that the run failed even if the launcher reports success.
    return status or 1 if status >= 0 else 128 - status
