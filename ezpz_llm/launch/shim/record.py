"""The record of a rank that failed. Imported only by a shim whose rank did."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from ezpz_llm.base.outside import system_text
from ezpz_llm.base.private import make_private
from ezpz_llm.launch.failures.facts import Failure
from ezpz_llm.launch.failures.tracebacks import NEAR_THE_END, NEAR_THE_END_IF_CAUGHT, last_exception, last_words
from ezpz_llm.launch.hostlist import expand_numbers
from ezpz_llm.launch.node.folder import read_beat
from ezpz_llm.launch.node.messages import logs_ordered, stop_ordered
from ezpz_llm.launch.shim.memory import Counts, evidence
from ezpz_llm.rundir.files import RunDir, write_atomic
from ezpz_llm.rundir.secrets import redact_words, without_secrets

_TAIL_LINES = 20
_TAIL_CHARACTERS = 16384
_KILLED_CODE = 137
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class Death:
    """How a rank's process ended, as its shim saw it. `told` is the signal to end that reached the shim first;
    `ended` is by the clock of the host, `lived_s` by one that does not jump."""

    rank: int
    pid: int
    code: int
    signal: str | None
    told: str | None
    ended: float
    lived_s: float
    started_monotonic: float
    argv: tuple[str, ...]
    output: str
    kills_before: Counts


def write_record(death: Death, run_dir: RunDir, run_id: str, heartbeat: Path) -> None:
    """Write errors/rankNNNN.json whole, or not at all.

    Raises:
        OSError: the run directory cannot be written to.
    """
    phase, step = read_beat(system_text(heartbeat))
    failure = Failure(
        rank=death.rank, host=socket.gethostname(), pid=death.pid, exit_code=death.code, signal=death.signal,
        ended=death.ended, duration_s=round(death.lived_s, 3),
        tail=tuple(line[-_TAIL_CHARACTERS:] for line in last_words(death.output, _TAIL_LINES)),
        argv=tuple(redact_words(death.argv)), exception=_exception(death), phase=phase, step=step,
        oom_killed=evidence(death.kills_before, (death.pid,), death.started_monotonic,
                            death.code == _KILLED_CODE),
        ended_by=_ended_by(death, run_dir, run_id), launch=run_id)
    run_dir.path.mkdir(parents=True, exist_ok=True)  # the rank, or somebody else, may have removed it
    with make_private(run_dir.errors) as errors:
        record = json.dumps(without_secrets(asdict(failure), os.environ), indent=2)
        errors.write(run_dir.rank_error(death.rank).name, record.encode())


def _exception(death: Death):
    if death.signal in _FROM_OUTSIDE:
        # It had no time to say why: what its output tells of was caught.
        return None
    return last_exception(death.output, NEAR_THE_END if death.code == 1 else NEAR_THE_END_IF_CAUGHT)


def _ended_by(death: Death, run_dir: RunDir, run_id: str) -> str | None:
    if death.told is None:
        return None
    return "launch" if stop_ordered(run_dir, run_id) is not None else death.told


def keep_log(log: Path, run_dir: RunDir, rank: int, has_failed: bool) -> None:
    """Copy a log that lies on the node into the run directory, if the rank failed or control/logs names it.

    Raises:
        OSError: it cannot be copied; nothing half-copied is left.
    """
    if has_failed or _is_wanted(run_dir, rank):
        write_atomic(run_dir.rank_log(rank), log.read_bytes())


def _is_wanted(run_dir: RunDir, rank: int) -> bool:
    try:
        return rank in expand_numbers(logs_ordered(run_dir))
    except ValueError:
        return False
