"""Record and log of an ended rank. Imported after the rank has ended, to keep the shim's start fast."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ezpz_llm.core.base import make_private, system_text
from ezpz_llm.core.rundir import RunDir, redact_words, without_secrets, write_atomic
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.messages import read_log_order, read_stop_order
from ezpz_llm.launcher.basics.node_folder import parse_heartbeat
from ezpz_llm.launcher.on_nodes.run_facts import Failure
from ezpz_llm.launcher.on_nodes.shim.memory import Counts, find_oom_evidence
from ezpz_llm.launcher.on_nodes.shim.shared_memory import find_full_shared_memory
from ezpz_llm.launcher.on_nodes.tracebacks import (
    MAX_LINES_AFTER,
    MAX_LINES_AFTER_IF_CAUGHT,
    last_exception,
    last_output_lines,
)

_TAIL_LINES = 20
_TAIL_CHARACTERS = 16384
_ERROR_CHARACTERS = 200
_KILLED_CODE = 137
_EXTERNAL_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class EndedRank:
    """Process of a rank that has ended.

    Attributes:
        signal: name of the signal that ended the process.
        shim_signal: name of the first signal that the shim received to end the rank.
        ended: epoch seconds by the node's clock.
        since: monotonic time of the start.
        kills_before: the kernel's counters of out-of-memory kills at the start.
    """

    rank: int
    run_id: str
    command: Sequence[str]
    pid: int
    code: int
    signal: str | None
    shim_signal: str | None
    ended: float
    duration_s: float
    since: float
    output: str
    heartbeat: Path
    kills_before: Counts


def make_record(run_dir: RunDir, process: EndedRank) -> Failure:
    """Return the record of an ended rank."""
    code = process.code
    phase, step = parse_heartbeat(system_text(process.heartbeat))
    # A killed rank could not print the reason; exceptions in its output were caught.
    exception = None if process.signal in _EXTERNAL_SIGNALS else last_exception(
        process.output, MAX_LINES_AFTER if code == 1 else MAX_LINES_AFTER_IF_CAUGHT)
    ended_by = process.shim_signal
    if ended_by and read_stop_order(run_dir, process.run_id) is not None:
        ended_by = "launch"
    return Failure(
        rank=process.rank, host=socket.gethostname(), pid=process.pid, exit_code=code, signal=process.signal,
        ended=process.ended, duration_s=round(process.duration_s, 3),
        tail=tuple(line[-_TAIL_CHARACTERS:] for line in last_output_lines(process.output, _TAIL_LINES)),
        argv=tuple(redact_words(process.command)), exception=exception, phase=phase, step=step,
        oom_killed=find_oom_evidence(process.kills_before, (process.pid,), process.since, code == _KILLED_CODE),
        shared_memory=find_full_shared_memory(), ended_by=ended_by, launch=process.run_id)


def write_record(run_dir: RunDir, failure: Failure) -> None:
    """Write errors/rankNNNN.json atomically.

    Raises:
        OSError: the run directory cannot be written to.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)  # may have been removed, by the rank or others
    with make_private(run_dir.errors) as errors:
        record = json.dumps(without_secrets(asdict(failure), os.environ), indent=2)
        errors.write(run_dir.rank_error(failure.rank).name, record.encode())


def error_line(failure: Failure) -> str:
    """Return the rank's error for the node's report: one line of at most 200 characters, without secrets.

    On a full disk, the reports of eight ranks then still fit in the block of 4 KiB that a report already has.
    """
    return " ".join(str(without_secrets(failure.error, os.environ)).split())[:_ERROR_CHARACTERS]


def keep_log(log: Path, run_dir: RunDir, rank: int, has_failed: bool) -> None:
    """Copy a log from the node to the run directory, if the rank failed or control/logs names it.

    Raises:
        OSError: the log cannot be copied; no partial copy is left.
    """
    if has_failed or _is_ordered(run_dir, rank):
        write_atomic(run_dir.rank_log(rank), log.read_bytes())


def _is_ordered(run_dir: RunDir, rank: int) -> bool:
    try:
        return rank in expand_numbers(read_log_order(run_dir))
    except ValueError:
        return False
