"""The records that failed ranks leave in errors/."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ezpz_llm.rundir.layout import RunDir


@dataclass(frozen=True)
class Raised:
    """An exception, as its rank's output shows it. `where` is the innermost frame of the user's own code
    ("train.py:12 in step"); `caused_by` the first of a chain ("KeyError: 'x'")."""

    type: str
    message: str
    where: str | None = None
    caused_by: str | None = None

    @property
    def line(self) -> str:
        """Type and first line of the message."""
        first = self.message.partition("\n")[0]
        return f"{self.type}: {first}" if self.type and first else self.type or first


@dataclass(frozen=True)
class Failure:
    """The record of one failed rank.

    `exit_code` is 128 + number where `signal` names one; `ended` is in epoch seconds by the clock of its host;
    `phase` and `step` are of its last heartbeat. `oom_killed` is the kernel's evidence. `ended_by` says who ended
    it, if it did not end by itself: "launch", or the signal that reached its shim.
    """

    rank: int
    host: str
    pid: int
    exit_code: int
    signal: str | None
    ended: float
    duration_s: float
    tail: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    exception: Raised | None = None
    phase: str | None = None
    step: int | None = None
    oom_killed: str | None = None
    ended_by: str | None = None

    @property
    def how(self) -> str:
        """`exit code 7`, or `signal SIGKILL (exit code 137)`."""
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"signal {self.signal} (exit code {self.exit_code})"


def read_failures(run_dir: RunDir) -> list[Failure]:
    """The records there are, earliest first."""
    records = [json.loads(path.read_text()) for path in run_dir.errors.glob("rank*.json")]
    return sorted((_failure(record) for record in records), key=lambda failure: (failure.ended, failure.rank))


def _failure(record: dict[str, Any]) -> Failure:
    raised = record.get("exception")
    return Failure(**{**record, "tail": tuple(record["tail"]), "argv": tuple(record["argv"]),
                      "exception": None if raised is None else Raised(**raised)})
