"""What an account is made from, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ezpz_llm.launch.variables import ENDS_AT_VARIABLE


@dataclass(frozen=True)
class Stop:
    """Why launch ended a run that had not ended by itself.

    `kind` is "signal" (launch was sent one, `signal` names it), "idle" (no sign of life) or "rank" (a rank had
    failed, and its peers went on). `text` says it in one line.
    """

    kind: str
    text: str
    signal: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """What the run directory does not tell about a run that has ended.

    `hosts` has one name a rank. `launcher_status` is the launcher's return code as subprocess gives it (-N for
    signal N); None where it is not known. `failed_before_stop` are the ranks that had left a record before launch
    began to end the run; None where launch did not. Times are in epoch seconds.
    """

    world_size: int
    hosts: tuple[str, ...]
    launcher: str
    launcher_status: int | None
    ended: float
    stopped: Stop | None = None
    failed_before_stop: frozenset[int] | None = None
    ends_at: float | None = None


@dataclass(frozen=True)
class Account:
    """How a run ended: launch's exit code, the cause in one line, the post-mortem (empty where all went well), the
    rank that was the cause, if one was, the kind of failure (a `Kind`'s name in lower case), and what else is known
    for programs to read."""

    facts: RunFacts
    code: int
    cause: str
    text: str = ""
    rank: int | None = None
    kind: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


def exit_record(account: Account) -> dict[str, object]:
    """What run.json keeps of a run's end: enough to give the account again from the files alone."""
    facts = account.facts
    before = None if facts.failed_before_stop is None else sorted(facts.failed_before_stop)
    return {
        "code": account.code, "cause": account.cause, "kind": account.kind, "rank": account.rank,
        "ended": facts.ended, "launcher_status": facts.launcher_status,
        "stopped": None if facts.stopped is None else asdict(facts.stopped), "failed_before_stop": before,
    }


NOT_STARTED = "not_started"


def not_started(code: int, cause: str, ended: float) -> dict[str, object]:
    """What run.json keeps where launch itself decided against the start."""
    return {"code": code, "cause": cause, "kind": NOT_STARTED, "rank": None, "ended": ended}


def facts_from(record: Mapping[str, Any], last_sign: float) -> RunFacts:
    """The facts as run.json has them. Where launch was killed before it wrote the end, the run ended at its
    `last_sign` of life, and nothing is known about how."""
    launch, ended = record["launch"], record.get("exit") or {}
    ranks = zip(launch["hosts"], launch["ranks_per_host"], strict=True)
    stopped, before = ended.get("stopped"), ended.get("failed_before_stop")
    ends_at = launch["env"].get(ENDS_AT_VARIABLE)
    return RunFacts(
        world_size=launch["world_size"], hosts=tuple(host for host, count in ranks for _ in range(count)),
        launcher=launch["launcher"], launcher_status=ended.get("launcher_status"),
        ended=ended.get("ended", last_sign), stopped=None if stopped is None else Stop(**stopped),
        failed_before_stop=None if before is None else frozenset(before),
        ends_at=float(ends_at) if ends_at else None)
