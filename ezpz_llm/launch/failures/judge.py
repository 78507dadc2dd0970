"""Cause of a run's end, chosen from all that is known about it. Pure: from records to a verdict.

A cause is told from its consequences by what a rank says, never by clocks alone, which differ between hosts; and
the time limit is told by the scheduler's words or by the clock, never by an exit code (143 has many reasons).
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ezpz_llm.base import EXIT_IDLE, EXIT_PREFLIGHT
from ezpz_llm.launch.failures import log_kinds
from ezpz_llm.launch.failures.classify import Finding, classify
from ezpz_llm.launch.failures.differences import Frame, last_calls, where_they_stand
from ezpz_llm.launch.failures.facts import Failure, Raised, RunFacts, Stop
from ezpz_llm.launch.failures.kinds import FOLLOWERS, Kind
from ezpz_llm.launch.failures.log_patterns import LogMatch
from ezpz_llm.launch.failures.texts import FailureText, filled_in, find_text, shipped_texts
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.hostnames import NodeNames, is_same_node
from ezpz_llm.launch.liveness import UNUSUAL_STATES

NEAR_THE_LIMIT_S = 60.0
"""Slurm looks at time limits every 30 s and rounds them to minutes; PBS is late rather than early."""

_OF_THE_SCHEDULER = {
    log_kinds.TIME_LIMIT: Kind.TIME_LIMIT, log_kinds.PREEMPTED: Kind.PREEMPTED,
    log_kinds.REQUEUED: Kind.REQUEUED,
    log_kinds.CANCELLED: Kind.CANCELLED,
}
_SIGTERM = 15


@dataclass(frozen=True)
class Verdict:
    """Why the run ended: launch's exit code, the kind, what shows it, and the rank and hosts concerned.

    Where no rank failed of itself: `ranks` are those without which the ranks `waiting` could not go on. `only` says
    on which hosts alone it was so, where all ranks there failed in that way, and none elsewhere. `cause` says it in
    plain words, and `advice` (see Finding) what helps, where a known text of a rank does, whose name is `text`.
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


_OF_A_PLACE = (Kind.MISSING_MODULE, Kind.NOT_FOUND, Kind.DISK_FULL)
"""What all ranks would run into if it were the program's: the hosts where none did tell the cause."""

_FROM_OUTSIDE = ("SIGTERM", "SIGKILL", "SIGINT", "SIGHUP")
_LAUNCH_KILLED = Verdict(128 + signal.SIGKILL, Kind.LAUNCHER, "launch itself was killed, and its ranks with it")


@dataclass(frozen=True)
class Evidence:
    """All that is known: the records, what the launcher and the scheduler said, and for ranks without a record
    what their logs show; `absent` are ranks that neither left a record nor ended well; `silent` are hosts that
    have not reported their end, though others have; `ended_early` are the seconds that ranks had run which
    ended with 0 by themselves; `stacks` are where silent ranks stood, the outermost call first."""

    failures: tuple[Failure, ...]
    log_matches: tuple[LogMatch, ...]
    facts: RunFacts
    absent: tuple[int, ...] = ()
    in_logs: Mapping[int, Raised] | None = None
    silent: tuple[str, ...] = ()
    ended_early: Mapping[int, float] = field(default_factory=dict)
    texts: tuple[FailureText, ...] = field(default_factory=shipped_texts)
    stacks: Mapping[int, Sequence[Frame]] = field(default_factory=dict)

    @functools.cached_property
    def found(self) -> dict[int, Finding]:
        """What kind of failure each record shows, by rank."""
        return {failure.rank: classify(failure, self.texts) for failure in self.failures}


def judge(evidence: Evidence) -> Verdict | None:
    """The cause of a run's end, None where it ended well."""
    facts = evidence.facts
    if not evidence.failures and facts.stopped is None and facts.launcher_status == 0:
        return _ended_in_order(evidence)
    for step in (_a_ranks_own, _the_schedulers, _a_lost_node, _aborted, _launchs_own, _a_victim, _the_launchers,
                 _a_silent_node):
        verdict = step(evidence)
        if verdict is not None:
            return verdict
    if facts.launcher_status is None:
        return _LAUNCH_KILLED
    code = _launchers_code(facts)
    by = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
    return Verdict(code, Kind.LAUNCHER, f"{facts.launcher} ended with code {code}{by}, and no rank left a record")


def _ended_in_order(evidence: Evidence) -> Verdict | None:
    """Ranks that the scheduler signals may save their work and end well; their run has not come to its end by that.
    In an salloc shell nobody else is told."""
    for found in evidence.log_matches:
        kind = _OF_THE_SCHEDULER.get(found.kind, Kind.CANCELLED)
        if found.kind in _OF_THE_SCHEDULER or found.kind == log_kinds.STEP_CANCELLED:
            return Verdict(128 + _SIGTERM, kind, found.text)
    return None


def _a_ranks_own(evidence: Evidence) -> Verdict | None:
    """A rank that failed of itself, before launch began to end the others."""
    in_time = evidence.facts.failed_before_stop
    own = [failure for failure in evidence.failures
           if evidence.found[failure.rank].kind not in FOLLOWERS and (in_time is None or failure.rank in in_time)]
    if _the_schedulers(evidence) is not None or _a_lost_node(evidence) is not None:
        # A scheduler that ends a job or a step signals ranks directly, too.
        own = [failure for failure in own if failure.signal not in _FROM_OUTSIDE
               or evidence.found[failure.rank].kind is Kind.OOM_KILLED]
    return _of_rank(own[0], evidence) if own else None


def _the_schedulers(evidence: Evidence) -> Verdict | None:
    facts = evidence.facts
    for found in evidence.log_matches:
        if found.kind in _OF_THE_SCHEDULER:
            return Verdict(_code_from_outside(evidence), _OF_THE_SCHEDULER[found.kind], found.text)
    told_to_end = facts.stopped is not None and facts.stopped.kind == "signal"
    terminated = [finding for finding in evidence.found.values() if finding.kind is Kind.TERMINATED]
    if (told_to_end or terminated) and facts.ends_at is not None:
        left = facts.ends_at - facts.ended
        if left <= NEAR_THE_LIMIT_S:
            when = f"{left:.0f} s before" if left > 0 else f"{-left:.0f} s after"
            return Verdict(_code_from_outside(evidence), Kind.TIME_LIMIT,
                           f"ended by {_signal_from_outside(evidence)} {when} the end of the reservation")
    return None


def _a_lost_node(evidence: Evidence) -> Verdict | None:
    said = [found for found in evidence.log_matches if found.kind == log_kinds.NODE_FAILED]
    hosts = tuple(dict.fromkeys(found.host for found in said if found.host))
    if said:
        named = NodeNames(hosts)
        ranks = [rank for rank, host in enumerate(evidence.facts.hosts) if host in named]
        words = next((found.text for found in said if found.host), said[0].text)
        return Verdict(_code_without_record(evidence), Kind.NODE_FAILED, words,
                       ranks[0] if ranks else None, hosts)
    return None


def _aborted(evidence: Evidence) -> Verdict | None:
    """A rank that MPI_Abort, or the launcher at once, ended before its shim could write a record."""
    for found in evidence.log_matches:
        if found.kind == log_kinds.ABORTED and found.ranks:
            return Verdict(found.code or 1, Kind.EXIT, found.text, found.ranks[0])
    if evidence.in_logs and not evidence.found:
        rank = min(evidence.in_logs)
        return Verdict(_code_without_record(evidence), Kind.EXCEPTION, evidence.in_logs[rank].line, rank)
    return None


def _launchs_own(evidence: Evidence) -> Verdict | None:
    """Launch ended the run: it was told to, or heard nothing."""
    stopped = evidence.facts.stopped
    if stopped is None or stopped.kind == "rank":
        return None
    if stopped.kind == "idle":
        early = _one_that_ended(EXIT_IDLE, evidence)
        if early is not None:
            return Verdict(EXIT_IDLE, Kind.IDLE, f"{early.evidence}; {stopped.text}")
        return _of_a_hang(stopped, evidence)
    if stopped.kind in ("refused", "late"):
        code = EXIT_PREFLIGHT if stopped.kind == "refused" else EXIT_IDLE
        is_other_world = any(found.kind == log_kinds.WRONG_WORLD for found in evidence.log_matches)
        return Verdict(code, Kind.WRONG_WORLD if is_other_world else Kind.NOT_STARTED, stopped.text,
                       hosts=_hosts(evidence.facts, evidence.absent))
    return Verdict(_code_from_outside(evidence), Kind.TERMINATED, stopped.text)


def _of_a_hang(stopped: Stop, evidence: Evidence) -> Verdict:
    """What the silent ranks wait for, where their stacks show it; if one is stopped, or waits for a device or a
    file system, the others wait for that."""
    ranks, places = where_they_stand(evidence.stacks)
    told = stopped.text if not places or places in stopped.text else f"{stopped.text}; {places}"
    found = [find_text(evidence.texts, last_calls(evidence.stacks[rank])) for rank in ranks]
    first = found[0] if found else None
    is_told = any(words in stopped.text for words in UNUSUAL_STATES.values())
    if first is None or is_told or any(one is None or one[0] is not first[0] for one in found):
        return Verdict(EXIT_IDLE, Kind.IDLE, told)
    text, _, match = first
    return Verdict(EXIT_IDLE, Kind.IDLE, f"{rank_ranges(ranks)}: {text.cause}: {told}",
                   hosts=_hosts(evidence.facts, ranks), cause=text.cause,
                   advice=filled_in(text.advice, match.groupdict()), text=text.name)


def _a_victim(evidence: Evidence) -> Verdict | None:
    """Nobody says that it failed of itself: ranks that vanished are the cause, else the first that suffered."""
    victims = [failure for failure in evidence.failures if evidence.found[failure.rank].kind in FOLLOWERS]
    if not victims:
        return None
    victims.sort(key=lambda failure: FOLLOWERS.index(evidence.found[failure.rank].kind))
    first = victims[0]
    finding = evidence.found[first.rank]
    if evidence.facts.launcher_status is None and finding.kind in (Kind.TERMINATED, Kind.STOPPED):
        return _LAUNCH_KILLED
    if evidence.absent and finding.kind in (Kind.PEER_LOST, Kind.COLLECTIVE_TIMEOUT):
        hosts = _hosts(evidence.facts, evidence.absent)
        return Verdict(_code_without_record(evidence), Kind.VANISHED, finding.evidence, evidence.absent[0],
                       hosts)
    if finding.kind in (Kind.PEER_LOST, Kind.COLLECTIVE_TIMEOUT):
        return (_one_that_ended(first.exit_code, evidence, min(victim.duration_s for victim in victims))
                or _one_that_did_not_come(first, evidence) or _of_rank(first, evidence))
    return _of_rank(first, evidence)


def _one_that_ended(code: int, evidence: Evidence, before_s: float = float("inf")) -> Verdict | None:
    """Ranks ended by themselves, and well, while others still counted on them.

    torchrun ends the others of a rank that fails, before we do: those may end with 0, but later than that rank.
    """
    limit_s = before_s if evidence.facts.launcher == "torchrun" else float("inf")
    ranks = tuple(sorted(rank for rank, lived_s in evidence.ended_early.items() if lived_s <= limit_s))
    others = tuple(rank for rank in range(evidence.facts.world_size) if rank not in evidence.ended_early)
    if not ranks or not others:
        return None
    after_s = min(evidence.ended_early[rank] for rank in ranks)
    hosts = _hosts(evidence.facts, ranks)
    were = "was" if len(others) == 1 else "were"
    return Verdict(code, Kind.ENDED_EARLY,
                   f"{rank_ranges(ranks)} on {', '.join(hosts)} ended with code 0 after {after_s:.1f} s while"
                   f" {rank_ranges(others)} {were} still running", ranks[0], hosts, ranks, others)


def _one_that_did_not_come(first: Failure, evidence: Evidence) -> Verdict | None:
    """Who is in a collective can time out there: where most did, the others are those that they waited for."""
    waiting = tuple(sorted(rank for rank, one in evidence.found.items() if one.kind is Kind.COLLECTIVE_TIMEOUT))
    others = [rank for rank in range(evidence.facts.world_size) if rank not in waiting]
    # Whoever lost a peer was there as well, as a rule.
    found = [rank for rank in others if rank not in evidence.found
             or evidence.found[rank].kind is not Kind.PEER_LOST] or others
    if not 0 < len(found) <= len(waiting):
        return None
    return Verdict(first.exit_code, Kind.COLLECTIVE_TIMEOUT, evidence.found[first.rank].evidence, found[0],
                   _hosts(evidence.facts, found), tuple(found), waiting, advice=evidence.found[first.rank].advice)


def _hosts(facts: RunFacts, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_host(facts, rank) for rank in ranks))


def _the_launchers(evidence: Evidence) -> Verdict | None:
    """No record at all: the launcher's words are what there is."""
    for means, kind in ((log_kinds.MEMORY, Kind.OOM_KILLED), (log_kinds.WRONG_WORLD, Kind.WRONG_WORLD),
                        (log_kinds.NOT_STARTED, Kind.NOT_STARTED), (log_kinds.ENDED, Kind.UNRECORDED)):
        for found in evidence.log_matches:
            if found.kind == means:
                hosts = (found.host,) if found.host else ()
                code = EXIT_PREFLIGHT if kind is Kind.NOT_STARTED else _launchers_code(evidence.facts)
                return Verdict(code, kind, found.text, found.ranks[0] if found.ranks else None, hosts)
    return None


def _a_silent_node(evidence: Evidence) -> Verdict | None:
    """The launcher ended all ranks before they could leave a record, and a node has not been heard of since."""
    silent = NodeNames(evidence.silent)
    gone = [rank for rank in evidence.absent if _host(evidence.facts, rank) in silent]
    if not gone or evidence.facts.launcher_status is None:
        return None
    return Verdict(_launchers_code(evidence.facts), Kind.VANISHED,
                   f"nothing has been heard of {', '.join(evidence.silent)} since", gone[0], evidence.silent)


def _of_rank(failure: Failure, evidence: Evidence) -> Verdict:
    finding = evidence.found[failure.rank]
    memory = [found.text for found in evidence.log_matches
              if found.kind == log_kinds.MEMORY
              and (found.host is None or is_same_node(found.host, failure.host))]
    if memory and failure.exit_code == 128 + signal.SIGKILL:
        finding = Finding(Kind.OOM_KILLED, memory[0])
    return Verdict(failure.exit_code, finding.kind, finding.evidence, failure.rank, (failure.host,),
                   only=_only(finding, evidence), cause=finding.cause, advice=finding.advice, text=finding.name)


def _only(finding: Finding, evidence: Evidence) -> str:
    """On which hosts alone all ranks failed like this. One rank a host says that of the host where it is known to
    lack something; of other failures two ranks that fail alike do."""
    alike, others = ranks_alike(finding.kind, finding.cause, evidence)
    hosts = _hosts(evidence.facts, alike)
    is_of_hosts = others and set(hosts).isdisjoint(_hosts(evidence.facts, others))
    is_told = finding.kind in _OF_A_PLACE or len(alike) > len(hosts)
    return f"on {', '.join(hosts)} only" if is_of_hosts and is_told else ""


def ranks_alike(kind: Kind, cause: str, evidence: Evidence) -> tuple[list[int], list[int]]:
    """The ranks whose records show this kind of failure, by the same words, and the others."""
    alike = [rank for rank, one in evidence.found.items() if one.kind is kind and one.cause == cause]
    return sorted(alike), [rank for rank in range(evidence.facts.world_size) if rank not in alike]


def _host(facts: RunFacts, rank: int) -> str:
    return facts.hosts[rank] if rank < len(facts.hosts) else "?"


def _signal_from_outside(evidence: Evidence) -> str:
    if evidence.facts.stopped is not None and evidence.facts.stopped.signal:
        return evidence.facts.stopped.signal
    return next((failure.ended_by for failure in evidence.failures if failure.ended_by not in (None, "launch")),
                "SIGTERM")


def _code_from_outside(evidence: Evidence) -> int:
    """128 + the signal that launch was sent; else the first rank's code; else the launcher's."""
    stopped = evidence.facts.stopped
    if stopped is not None and stopped.signal:
        return 128 + signal.Signals[stopped.signal]
    return evidence.failures[0].exit_code if evidence.failures else _launchers_code(evidence.facts)


def _code_without_record(evidence: Evidence) -> int:
    """The launcher's code, if it ended by itself, else that of the first rank that has one."""
    if evidence.facts.stopped is None and evidence.facts.launcher_status:
        return _launchers_code(evidence.facts)
    return next((failure.exit_code for failure in evidence.failures), 1)


def _launchers_code(facts: RunFacts) -> int:
    status = facts.launcher_status
    if status is None:
        return 1
    # A launcher that reports success although ranks are missing has not succeeded.
    return status or 1 if status >= 0 else 128 - status
