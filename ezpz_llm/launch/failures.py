"""Failed ranks: their records, which one was the cause, and how it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.rundir.layout import RunDir

# What a rank says when another one has gone: it cannot be the cause, whatever its clock says.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|ncclRemoteError"
    r"|Connection was likely closed"
)

_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Failure:
    """The record of one failed rank. `exit_code` is 128 + number where `signal` names one; `ended` is in epoch
    seconds by the clock of its host."""

    rank: int
    host: str
    pid: int
    exit_code: int
    signal: str | None
    ended: float
    duration_s: float
    tail: tuple[str, ...]
    argv: tuple[str, ...]

    @property
    def lost_a_peer(self) -> bool:
        """Does its own last output blame another rank?"""
        return self.signal is None and any(_PEER_LOST.search(line) for line in self.tail)

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
    return Failure(**{**record, "tail": tuple(record["tail"]), "argv": tuple(record["argv"])})


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The cause: the earliest record of a rank that did not merely lose a peer; else the earliest."""
    in_order = sorted(failures, key=lambda failure: (failure.lost_a_peer, failure.ended, failure.rank))
    return in_order[0] if in_order else None


def post_mortem(cause: Failure, others: Sequence[Failure], run_dir: RunDir) -> str:
    """A short account: which rank on which host, how it ended, its last lines, its log, and what became of the
    others."""
    lines = [f"launch: rank {cause.rank} on {cause.host} failed: {cause.how}, after {cause.duration_s:.1f} s"]
    lines += [f"  | {line}" for line in cause.tail] or ["  (it printed nothing)"]
    lines.append(f"  its log: {run_dir.rank_log(cause.rank)}")
    if others:
        named = ", ".join(f"{failure.rank} ({failure.signal or failure.exit_code})" for failure in others[:8])
        lines.append(f"  after it, rank(s) {named}{', …' if len(others) > 8 else ''} ended too")
    return "\n".join(lines)


def last_lines(run_dir: RunDir, ranks: int = 3, lines: int = 5) -> list[str]:
    """The ends of the logs that were written last, for a launcher that killed all ranks before any left a record
    (as MPI_Abort has it done)."""
    logs = sorted(run_dir.rank_log(0).parent.glob("rank*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    shown = []
    for log in [log for log in logs if log.stat().st_size][:ranks]:
        tail = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-lines:]
        shown += [f"  last lines of {log}:", *(f"  | {line}" for line in tail)]
    return shown
