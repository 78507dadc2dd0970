"""Record and log of an ended rank. Imported after the rank has ended, to keep the shim's start fast."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ezpz_llm.base import make_private, system_text
from ezpz_llm.launch.failures.run_facts import Failure
from ezpz_llm.launch.failures.tracebacks import (
    MAX_LINES_AFTER,
    MAX_LINES_AFTER_IF_CAUGHT,
    last_exception,
    last_output_lines,
)
from ezpz_llm.launch.hostlist import expand_numbers
from ezpz_llm.launch.node.folder import parse_heartbeat
from ezpz_llm.launch.node.messages import read_log_order, read_stop_order
from ezpz_llm.launch.shim.memory import find_oom_evidence
from ezpz_llm.rundir import RunDir, redact_words, without_secrets, write_atomic

if TYPE_CHECKING:
    from ezpz_llm.launch.shim.rank import Rank

_TAIL_LINES = 20
_TAIL_CHARACTERS = 16384
_KILLED_CODE = 137
_EXTERNAL_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


def write_record(rank: Rank, pid: int, code: int, signal: str | None) -> None:
    """Write errors/rankNNNN.json atomically after the rank's process `pid` has ended.

    Raises:
        OSError: the run directory cannot be written to.
    """
    number, run_dir, output = rank.info.rank, rank.run_dir, rank.output.tail()
    phase, step = parse_heartbeat(system_text(rank.heartbeat()))
    # A killed rank could not print the reason; exceptions in its output were caught.
    exception = None if signal in _EXTERNAL_SIGNALS else last_exception(
        output, MAX_LINES_AFTER if code == 1 else MAX_LINES_AFTER_IF_CAUGHT)
    ended_by = rank.end_signal.name if rank.end_signal else None
    if ended_by and read_stop_order(run_dir, rank.run_id) is not None:
        ended_by = "launch"
    failure = Failure(
        rank=number, host=socket.gethostname(), pid=pid, exit_code=code, signal=signal,
        # The end by the node's clock, the duration by a monotonic clock.
        ended=rank.started + rank.lived_s, duration_s=round(rank.lived_s, 3),
        tail=tuple(line[-_TAIL_CHARACTERS:] for line in last_output_lines(output, _TAIL_LINES)),
        argv=tuple(redact_words(rank.command)), exception=exception, phase=phase, step=step,
        oom_killed=find_oom_evidence(rank.kills_before, (pid,), rank.started_monotonic, code == _KILLED_CODE),
        ended_by=ended_by, launch=rank.run_id)
    run_dir.path.mkdir(parents=True, exist_ok=True)  # may have been removed, by the rank or others
    with make_private(run_dir.errors) as errors:
        record = json.dumps(without_secrets(asdict(failure), os.environ), indent=2)
        errors.write(run_dir.rank_error(number).name, record.encode())


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
