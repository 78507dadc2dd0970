"""Facts of a run's end, from the records that failed ranks leave in errors/, and the post-mortem's values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ezpz_llm.base import Epoch, UserError, as_dataclass, epoch, read_records
from ezpz_llm.launch.variables import ENDS_AT_VARIABLE
from ezpz_llm.rundir import RunDir


@dataclass(frozen=True)
class Stop:
    """Why launch ended a run that had not ended by itself.

    `kind` is "signal" (launch was sent one, `signal` names it), "idle" (no sign of life), "rank" (a rank had
    failed, and its peers went on), "refused" (a rank cannot start, by the launcher's own words) or "late" (a rank
    did not start in time). `text` says it in one line. `ranks` are those that gave no sign of life.
    """

    kind: str
    text: str
    signal: str | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """What the run directory does not tell about a run that has ended.

    `hosts` has one name a rank. `launcher_status` is the launcher's return code as subprocess gives it (-N for
    signal N); None where it is not known. `failed_before_stop` are the ranks that had left a record before launch
    began to end the run, `ended_before_stop` those that had ended with 0; None where launch did not. Times are
    in epoch seconds.
    """

    world_size: int
    hosts: tuple[str, ...]
    launcher: str
    launcher_status: int | None
    ended: float
    stopped: Stop | None = None
    failed_before_stop: frozenset[int] | None = None
    ended_before_stop: frozenset[int] | None = None
    ends_at: float | None = None


@dataclass(frozen=True)
class Postmortem:
    """How a run ended: launch's exit code, the cause in one line, the post-mortem (empty where all went well), the
    rank that was the cause, if one was, the kind of failure (a `Kind`'s name in lower case), and what else is known
    for programs to read. `brief` is the post-mortem for somebody who has just read rank `lines_of`'s output."""

    facts: RunFacts
    code: int
    cause: str
    text: str = ""
    rank: int | None = None
    kind: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    brief: str = ""
    lines_of: int | None = None


def exit_record(postmortem: Postmortem) -> dict[str, object]:
    """What run.json keeps of a run's end: enough to make the post-mortem again from the files alone."""
    facts = postmortem.facts
    failed, ended = (None if ranks is None else sorted(ranks)
                     for ranks in (facts.failed_before_stop, facts.ended_before_stop))
    return {
        "code": postmortem.code, "cause": postmortem.cause, "kind": postmortem.kind, "rank": postmortem.rank,
        "ended": facts.ended, "launcher_status": facts.launcher_status,
        "stopped": None if facts.stopped is None else asdict(facts.stopped), "failed_before_stop": failed,
        "ended_before_stop": ended,
    }


NOT_STARTED = "not_started"


def not_started(code: int, cause: str, ended: float) -> dict[str, object]:
    """What run.json keeps where launch itself decided against the start."""
    return {"code": code, "cause": cause, "kind": NOT_STARTED, "rank": None, "ended": ended}


def facts_from(record: Mapping[str, Any], last_sign: float) -> RunFacts:
    """The facts as run.json has them. Where launch was killed before it wrote the end, the run ended at its
    `last_sign` of life, and nothing is known about how.

    Raises:
        UserError: the numbers in it contradict each other.
    """
    launch, ended = record["launch"], record.get("exit") or {}
    hosts, counts = launch["hosts"], launch["ranks_per_host"]
    if len(hosts) != len(counts) or sum(counts) != launch["world_size"]:
        raise UserError(f"run.json has {launch['world_size']} ranks, and {sum(counts)} on {len(hosts)} hosts")
    stopped = ended.get("stopped")
    failed, well = (None if ended.get(name) is None else frozenset(ended[name])
                    for name in ("failed_before_stop", "ended_before_stop"))
    ends_at = launch["env"].get(ENDS_AT_VARIABLE)
    return RunFacts(
        world_size=launch["world_size"],
        hosts=tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count)),
        launcher=launch["launcher"], launcher_status=ended.get("launcher_status"),
        ended=ended.get("ended", last_sign),
        stopped=None if stopped is None else as_dataclass(Stop, stopped, "run.json"),
        failed_before_stop=failed, ended_before_stop=well,
        ends_at=epoch(ends_at.partition(".")[0]) if ends_at else None)


# The records that failed ranks leave in errors/.
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
        code = f"exit code {self.exit_code}"
        return code if self.signal is None else f"signal {self.signal} ({code})"


def read_failures(run_dir: RunDir, run_id: str) -> list[Failure]:
    """The records that ranks of one launch have left (of any, where `run_id` is empty), earliest first. What is not
    one that a shim wrote is passed over: it must not keep the others from being told."""
    failures = read_records(Failure, run_dir.errors, "rank")
    own = [failure for failure in failures if not run_id or failure.launch in ("", run_id)]
    return sorted(own, key=lambda failure: (failure.ended, failure.rank))
