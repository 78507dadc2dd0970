"""PBS Pro and OpenPBS: the lines that ask for a job, and the words that queue it."""

from __future__ import annotations

import re
import shlex

from ezpz_llm.base.errors import UserError
from ezpz_llm.submit.request import Request, clock

NAME, PROGRAM, TEMPLATE, DIRECTIVE = "pbs", "qsub", "pbs.sh", "#PBS"

AGAIN: dict[str, str] = {}
"""Only operators may queue a running job again; those of a chain follow each other."""

_HINTS = ((r"account|project|allocation", "--account"), (r"queue", "--queue"), (r"walltime", "--time"),
          (r"select|nodes|nodect", "--nodes"))


def time(seconds: int) -> str:
    """The limit as `walltime` takes it: hours, not days."""
    return clock(seconds)


def directives(request: Request) -> list[str]:
    """The lines of a job that no site has anything to add to. PBS joins chunks on one host unless told to scatter.

    Raises:
        UserError: a name or folder that PBS cannot take, or a queue beside a reservation.
    """
    if request.queue and request.reservation:
        raise UserError(f"queue {request.queue} and reservation {request.reservation}",
                        where="--queue, --reservation", instead="only --reservation: in PBS it is a queue itself")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]{0,229}", request.name):
        raise UserError(f"PBS takes no job name {request.name!r}", where="--name",
                        instead="a letter, and then letters, digits and _ . + -")
    if not re.fullmatch(r"[A-Za-z0-9_./@%+=~-]+", str(request.output)):
        # A colon is read as the end of a host's name, and a blank as the end of the path.
        raise UserError(f"PBS cannot write a job's output to {str(request.output)!r}", where="the run directory",
                        instead="--run-dir with letters, digits and _ . / @ % + = ~ - only")
    words = [
        # Whatever the user's login shell is.
        "-S /bin/bash",
        f"-N {request.name}",
        f"-l select={request.nodes}",
        "-l place=scatter:excl",
        f"-l walltime={time(request.time_s)}",
        # In one file, written while the job runs and not only at its end.
        "-j oe",
        "-k doe",
        f"-o {request.output}/",
        f"-r {'y' if request.requeue else 'n'}",
    ]
    words += [f"{option} {value}" for option, value in (
        ("-A", request.account), ("-q", request.reservation or request.queue)) if value]
    return [f"{DIRECTIVE} {word}" for word in words]


def subjects(line: str) -> set[str]:
    """What a directive line decides: of two lines with the same subject only one may stay."""
    words = line.split()
    if words[1] != "-l":
        return {words[1]}
    # One -l can ask for several resources; the chunks of a select hold no comma that a name follows.
    return {f"-l {name}" for name in re.findall(r"(?:^|,)(\w+)=", words[2] if len(words) > 2 else "")}


def submission(script: str, after: str | None) -> list[str]:
    """The command that queues `script`, to begin after the job `after` has ended in whatever way."""
    dependency = ["-W", f"depend=afterany:{after}"] if after else []
    return [PROGRAM, *dependency, script]


def job_id(line: str) -> str | None:
    """The id in what qsub printed (`5.login`, `10[].login`); None where it is none."""
    return line if re.fullmatch(r"\d+(\[\d*\])?(\.[\w.-]+)?", line, re.ASCII) else None


def watch(ids: list[str]) -> str:
    """How to look at the jobs."""
    return f"qstat {shlex.join(ids)}"


def cancel(ids: list[str]) -> str:
    """How to end the jobs."""
    return f"qdel {shlex.join(ids)}"


def output_file(request: Request, job: str) -> str:
    """Where that job's output goes: PBS names it after the job where it is given a folder."""
    return str(request.output / f"{job}.OU")


def hint(words: str) -> str | None:
    """The option of ours that qsub's complaint is about, where it can be told."""
    return next((option for pattern, option in _HINTS if re.search(pattern, words, re.IGNORECASE)), None)
