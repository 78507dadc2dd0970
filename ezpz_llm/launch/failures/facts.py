"""What an account is made from, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    rank that was the cause, if one was, and the kind of failure (a `Kind`'s name in lower case)."""

    code: int
    cause: str
    text: str = ""
    rank: int | None = None
    kind: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
