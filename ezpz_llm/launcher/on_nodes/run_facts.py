"""Records of failed ranks (errors/), facts about a run's end, and the post-mortem built from them.

The shims import this module, so it must not import `ezpz_llm.core.rundir.records`; `recorded_exit` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ezpz_llm.core.base import Epoch, read_records
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics.log_text import BUILD_ERROR, ERROR_WORDS

_ERROR_MARK = re.compile(r"(?i)\b(?:error|fatal): ")
_PYDANTIC = re.compile(r"\d+ validation errors? for \S+")
"""First line of pydantic's errors; the next two lines have the first field and its problem."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a finished run that its logs and records do not hold.

    Attributes:
        hosts: the hostname of each rank.
        launcher_status: the launcher's return code (-N for signal N, as in subprocess); None if unknown.
        started, ended, ends_at: the run's start and end, and the job's end time, in epoch seconds.
        scheduler, job_id: of the allocation, as in `Allocation`.
        steps: the scheduler's steps (JOB.STEP) that nodes have reported; empty if unknown.
        failed_before_stop: ranks that had left a record before launch began to end the run; None if launch did not
            end it.
        ended_before_stop: ranks that had ended with code 0 by then.
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
    started: float | None = None
    scheduler: str = ""
    job_id: str | None = None
    steps: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Postmortem:
    """Post-mortem of a run.

    Attributes:
        code: launch's exit code.
        cause: the root cause in one line.
        text: the printed post-mortem; empty if the run succeeded.
        rank: the rank that caused the failure, if any.
        kind: the name of a `Kind` in lower case.
        details: everything else, for JSON.
        brief: `text` without the last lines of rank `lines_of`, for a console that already shows them.
    """

    facts: RunFacts
    code: int
    cause: str
    text: str = ""
    rank: int | None = None
    kind: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    brief: str = ""
    lines_of: int | None = None


@dataclass(frozen=True)
class Raised:
    """Exception found in a rank's output.

    Attributes:
        where: the innermost frame of the user's own code, such as "train.py:12 in step".
        caused_by: the first exception of a chain, such as "KeyError: 'x'".
    """

    type: str
    message: str
    where: str | None = None
    caused_by: str | None = None

    @property
    def line(self) -> str:
        """Type and first line of the message; for NCCL errors, the line after "Last error:".

        Continues with the next lines if the first only announces them. For a failed build, the compiler's error.
        """
        lines = self.message.split("\n")
        if (build_error := next(filter(BUILD_ERROR.match, lines[1:]), None)) is not None:
            return self._with_type(build_error.strip())
        first = next((after for before, after in itertools.pairwise(lines) if before == "Last error:"), lines[0])
        if first.endswith(":"):
            first = " ".join([first, *(line.strip() for line in lines[1:2])])
        elif _PYDANTIC.fullmatch(first):
            first = ": ".join([first, *(line.strip() for line in lines[1:3])])
        return self._with_type(first.strip())

    @property
    def printed_line(self) -> str:
        """Line of output that has the type and the first line of the message."""
        return self._with_type(self.message.partition("\n")[0])

    def _with_type(self, text: str) -> str:
        return f"{self.type}: {text}" if self.type and text else self.type or text


@dataclass(frozen=True)
class Failure:
    """Record of one failed rank.

    Attributes:
        exit_code: 128 + the signal's number if `signal` ended the rank.
        ended: epoch seconds by the node's clock.
        phase, step: from the last heartbeat.
        oom_killed: the kernel's evidence of an out-of-memory kill.
        shared_memory: evidence that /dev/shm was full when the rank ended.
        ended_by: "launch", or the signal that the shim received; None if the rank ended by itself.
        launch: the run id.
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
    shared_memory: str | None = None
    ended_by: str | None = None
    launch: str = ""

    @property
    def error(self) -> str:
        """Line of output that explains the failure: an exception, else this package's last error.

        Without both, the last line with "error: " or "fatal: ", with other words of an error, or with any letter.
        """
        if self.exception is not None:
            return self.exception.line
        lines = [line for line in reversed(self.tail) if any(map(str.isalnum, line))]
        own_errors = (line for line in lines if line.startswith("error: "))
        marked = (line for line in lines if _ERROR_MARK.search(line))
        errors = (line for line in lines if ERROR_WORDS.search(line))
        return next(itertools.chain(own_errors, marked, errors, lines), "")

    @property
    def exit_text(self) -> str:
        """Exit as text: `exit code 7`, or `signal SIGKILL (exit code 137)`."""
        code = f"exit code {self.exit_code}"
        return code if self.signal is None else f"signal {self.signal} ({code})"


def read_failures(run_dir: RunDir, run_id: str) -> list[Failure]:
    """Read the failure records of one launch, or of all launches if `run_id` is empty, earliest first.

    Invalid records are skipped, so that one damaged file does not hide the others.
    """
    failures = read_records(Failure, run_dir.errors, "rank")
    of_launch = [failure for failure in failures if not run_id or failure.launch in ("", run_id)]
    return sorted(of_launch, key=lambda failure: (failure.ended, failure.rank))
