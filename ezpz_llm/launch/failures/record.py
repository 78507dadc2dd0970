"""The records that failed ranks leave in errors/."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ezpz_llm.base.records import read_records
from ezpz_llm.base.schema import Epoch
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
        """Type and first line of the message, or the line that NCCL's messages have it in."""
        lines = self.message.split("\n")
        first = next((after for before, after in itertools.pairwise(lines) if before == "Last error:"), lines[0])
        return f"{self.type}: {first}" if self.type and first else self.type or first


@dataclass(frozen=True)
class Failure:
    """The record of one failed rank.

    `exit_code` is 128 + number where `signal` names one; `ended` is in epoch seconds by the clock of its host;
    `phase` and `step` are of its last heartbeat. `oom_killed` is the kernel's evidence. `ended_by` says who ended
    it, if it did not end by itself: "launch", or the signal that reached its shim. `launch` is the run id.
    """

    rank: int
    host: str
    pid: int
    exit_code: int
    signal: str | None
    ended: Epoch
    duration_s: float
    tail: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    exception: Raised | None = None
    phase: str | None = None
    step: int | None = None
    oom_killed: str | None = None
    ended_by: str | None = None
    launch: str = ""

    @property
    def how(self) -> str:
        """`exit code 7`, or `signal SIGKILL (exit code 137)`."""
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"signal {self.signal} (exit code {self.exit_code})"


def read_failures(run_dir: RunDir, run_id: str) -> list[Failure]:
    """The records that ranks of one launch have left (of any, where `run_id` is empty), earliest first. What is not
    one that a shim wrote is passed over: it must not keep the others from being told."""
    failures = read_records(Failure, run_dir.errors, "rank")
    own = [failure for failure in failures if not run_id or failure.launch in ("", run_id)]
    return sorted(own, key=lambda failure: (failure.ended, failure.rank))
