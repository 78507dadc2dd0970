"""Slurm: the lines that ask for a job, and the words that queue it."""

from __future__ import annotations

import re
import shlex

from ezpz_llm.base.errors import UserError
from ezpz_llm.submit.request import Request, clock_with_days

NAME, PROGRAM, TEMPLATE, DIRECTIVE = "slurm", "sbatch", "slurm.sh", "#SBATCH"

AGAIN = {"scontrol": "scontrol", "requeue": "requeue", "JOB": '"$SLURM_JOB_ID"'}
"""The words by which a running job asks to be queued again, and what stands for them in the script."""

_SHORT = {"-A": "--account", "-C": "--constraint", "-J": "--job-name", "-N": "--nodes", "-o": "--output",
          "-p": "--partition", "-q": "--qos", "-t": "--time"}
_HINTS = ((r"account|project", "--account"), (r"partition|qos", "--queue"), (r"time limit", "--time"),
          (r"node count|node configuration|[Nn]odes", "--nodes"), (r"reservation", "--reservation"))


def time(seconds: int) -> str:
    """The limit as `--time` takes it."""
    return clock_with_days(seconds)


def directives(request: Request) -> list[str]:
    """The lines of a job that no site has anything to add to. Whole nodes: with --nodes alone Slurm may give one
    core of each."""
    # sbatch takes quotes off as a shell does, but has no way to write a control character.
    for value in (request.name, str(request.output)):
        if not value.isprintable():
            raise UserError(f"a job name or run directory with a control character: {value!r}",
                            instead="--name or --run-dir with printable characters only")
    output = str(request.output).replace("%", "%%")
    words = [
        f"--job-name={shlex.quote(request.name)}",
        f"--nodes={request.nodes}",
        "--exclusive",
        f"--time={time(request.time_s)}",
        # A job that is started again adds to what it printed before.
        f"--output={shlex.quote(output + '/job-%j.log')}",
        "--open-mode=append",
        "--requeue" if request.requeue else "--no-requeue",
    ]
    words += [f"--{option}={value}" for option, value in (
        ("account", request.account), ("partition", request.queue), ("reservation", request.reservation)) if value]
    return [f"{DIRECTIVE} {word}" for word in words]


def subjects(line: str) -> set[str]:
    """What a directive line decides: of two lines with the same subject only one may stay."""
    word = re.split(r"[=\s]", line.split()[1])[0]
    return {_SHORT.get(word, word)}


def submission(script: str, after: str | None) -> list[str]:
    """The command that queues `script`, to begin after the job `after` has ended in whatever way."""
    dependency = [f"--dependency=afterany:{after}"] if after else []
    return [PROGRAM, "--parsable", *dependency, script]


def job_id(line: str) -> str | None:
    """The id in what sbatch printed (`123`, `123;cluster`); None where it is none."""
    match = re.fullmatch(r"(\d+)(;[\w.-]+)?", line, re.ASCII)
    return match[1] if match else None


def watch(ids: list[str]) -> str:
    """How to look at the jobs."""
    return f"squeue -j {','.join(ids)}"


def cancel(ids: list[str]) -> str:
    """How to end the jobs."""
    return f"scancel {' '.join(ids)}"


def output_file(request: Request, job: str) -> str:
    """Where that job's output goes."""
    return str(request.output / f"job-{job}.log")


def hint(words: str) -> str | None:
    """The option of ours that sbatch's complaint is about, where it can be told."""
    return next((option for pattern, option in _HINTS if re.search(pattern, words, re.IGNORECASE)), None)
