"""Text of a job script (a filled-in template from `jobs/`), and its submission to the scheduler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import SECRET_VARIABLE, UserError, data_dir, print_lines
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, hide, redact, secret_values
from ezpz_llm.launcher.basics.devices import MASKS
from ezpz_llm.launcher.basics.variables import (
    ENDS_AT_VARIABLE,
    FORWARDED,
    FORWARDED_PREFIXES,
    RANK_NAMES_VARIABLE,
    RANKS_OWN,
    RANKS_PER_NODE_VARIABLE,
    RUN_ID_VARIABLE,
    SITE_VARIABLE,
    TERMINAL_VARIABLE,
    TORCHS_OWN,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.launcher.jobs.schedulers import scheduler_here, schedulers
from ezpz_llm.launcher.jobs.schedulers.scheduler import BatchScheduler

_HEADING = re.compile(r"^# ---- (\w+).*\n", re.MULTILINE)


def fill_template(name: str, introduction: str, sections: dict[str, list[str]]) -> str:
    """Return the template `name` with a new introduction and with `sections` replaced."""
    shebang, _, text = (data_dir("jobs") / name).read_text(encoding="utf-8").partition("\n")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    parts = [f"{shebang}\n{introduction}\n\n"]
    for heading, end in zip(headings, ends, strict=True):
        lines = sections.get(heading[1])
        parts.append(heading[0] + (text[heading.end():end] if lines is None else "\n".join(lines) + "\n\n"))
    return "".join(parts)


def request_lines(own: Sequence[str], of_site: Sequence[str], values: dict[str, str | None],
                  subjects: Callable[[str], set[str]], site: str) -> list[str]:
    """Return submit's directives, then the site's, with `values` in place of {names}.

    Omits a directive of submit if one of the site's directives has the same subject, or sets the same {account},
    {queue} or {reservation}.

    Raises:
        UserError: the site's directives need a value that was not given.
    """
    site_subjects = set().union(*(subjects(line) for line in of_site))
    site_names = {name for line in of_site for name in re.findall(r"\{(\w+)\}", line)}
    own_lines = [line for line in own
                 if not subjects(line) & site_subjects and not _sets_value(line, site_names, values)]
    return own_lines + [_fill_placeholders(line, values, site) for line in of_site]


def _sets_value(line: str, names: set[str], values: dict[str, str | None]) -> bool:
    parts = re.split(r"[=\s]", line)
    return any(values.get(name) is not None and parts[-1] == values[name]
               for name in names & {"account", "queue", "reservation"})


def _fill_placeholders(line: str, values: dict[str, str | None], site: str) -> str:
    def value(match: re.Match[str]) -> str:
        """Return the value for a `{name}` in a directive of the site."""
        if match[1] not in values:
            raise UserError(f"unknown placeholder {match[0]} in a directive: {line!r}", where=f"site {site}",
                            instead=" ".join(f"{{{name}}}" for name in values))
        if values[match[1]] is None:
            raise UserError(f"site {site} requires --{match[1]}", where=f"its directive {line!r}",
                            instead=f"ezpz-llm submit --{match[1]} … ")
        return str(values[match[1]])

    return re.sub(r"\{(\w+)\}", value, line)


def array_lines(name: str, words: Sequence[str], replaced: dict[str, str]) -> list[str]:
    """Return the lines of a bash array of `words`, quoted. `replaced` maps some words to shell text.

    Several words share a line, so that the script is readable.
    """
    lines, line = [], f"{name}=("
    for position, word in enumerate(words):
        text = replaced.get(word) or shlex.quote(word)
        if position and len(line) + len(text) > 110:
            lines.append(line)
            line = "    "
        line += ("" if line.endswith(("(", "    ")) else " ") + text
    return [*lines, f"{line})"]


_TIMEOUT_S = 120


class RejectedError(UserError):
    """The scheduler definitely did not queue the job."""


def queue_chain(scheduler: BatchScheduler, script: Path, count: int, env: Mapping[str, str]) -> Iterator[str]:
    """Submit the script `count` times and yield the job ids. Each job starts after the previous one has ended.

    Raises:
        RejectedError: the scheduler rejects a job.
        UserError: the scheduler does not answer, or does not print one job id; the job may be queued.
    """
    after: str | None = None
    for number in range(1, count + 1):
        after = _queue(scheduler, scheduler.submission(str(script), after), number, env)
        yield after


def _queue(scheduler: BatchScheduler, command: list[str], number: int, env: Mapping[str, str]) -> str:
    program = command[0]
    earlier = f" (job {number} of the chain; the earlier ones are queued)" if number > 1 else ""
    try:
        with open(command[-1] if scheduler.TAKES_STDIN else os.devnull, "rb") as stdin:
            result = subprocess.run(command[:-1] if scheduler.TAKES_STDIN else command, env=dict(env), stdin=stdin,
                                    capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
                                    check=False)
    except OSError as error:
        raise RejectedError(f"cannot run {program}: {error.strerror}", where="PATH", exit_code=1) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{program} did not answer within {_TIMEOUT_S} s{earlier}", where=command[-1], exit_code=1,
                        instead="check whether the job is queued before you submit it again") from error
    print_lines(result.stderr, end="", file=sys.stderr)
    if result.returncode:
        print_lines(result.stdout, end="", file=sys.stderr)
        option = scheduler.hint(result.stderr + result.stdout)
        change = f"use another {option}, or edit" if option else "edit"
        # The script's path is left out: submit removes the run directory of a job that was never queued.
        raise RejectedError(f"{program} rejected the job with code {result.returncode}{earlier}",
                           where=shlex.join(command[:-1]), exit_code=1,
                           instead=f"{change} the script (ezpz-llm submit --dry-run prints it) and submit it with "
                                   f"{program}")
    # A site's wrapper may print more than the id.
    ids = [job for line in result.stdout.splitlines() if (job := scheduler.job_id(line.strip()))]
    if len(ids) != 1:
        raise UserError(f"{program} did not print exactly one job id: {result.stdout!r}{earlier}",
                        where=command[-1], exit_code=1, instead="check whether the job is queued")
    return ids[0]


_RESERVE_S, _RESERVED_PART = 60, 6
"""Reserve in seconds for the time between a job's start, as the scheduler counts it, and the first line of its
script; for a short job at most 1/6 of its time limit."""

_LAUNCH_VARIABLES = (*MASKS, *RANKS_OWN, *TORCHS_OWN, RUN_DIR_VARIABLE, RUN_ID_VARIABLE, SECRET_VARIABLE,
                     WORLD_SIZE_VARIABLE, RANKS_PER_NODE_VARIABLE, RANK_NAMES_VARIABLE, ENDS_AT_VARIABLE,
                     TERMINAL_VARIABLE)
# The job sets HOME itself, and PATH and the site have their own lines in the script.
_NOT_EXPORTED = ("HOME", "PATH", SITE_VARIABLE, *_LAUNCH_VARIABLES)
_ENVIRONMENT_VARIABLES = ("CONDA_PREFIX", "MPI4PY_LIBMPI")
_MPI_PREFIXES = ("PMI_", "PMIX_", "PALS_", "OMPI_", "HYDRA_")


def environment_lines(env: Mapping[str, str], folder: Path, setup: tuple[str, ...], time_s: int, *,
                      has_modules: bool) -> list[str]:
    """Return shell lines that set the job's environment, without secrets.

    They export the variables that a run depends on, because PBS does not pass on the environment of submit, and
    Slurm does so only at some sites. They also run the site's lines and put this Python first on PATH.

    Args:
        folder: the working directory.
        setup: the site's shell lines.
        time_s: the job's time limit in seconds.
        has_modules: the site's lines load modules, whose PATH must precede that of the login node.
    """
    secrets = secret_values(env)
    lines = [f"cd {shlex.quote(str(folder))} || exit"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())
              if _is_exported(name) and redact(hide(value, secrets), name) == value]
    path = shlex.quote(env.get("PATH", os.defpath))
    lines += [*setup, f"export PATH=$PATH:{path}" if has_modules else f"export PATH={path}:$PATH"]
    # sys.prefix without resolving links: the environment's python3 and launch must come first.
    lines += [f"export PATH={shlex.quote(os.path.join(sys.prefix, 'bin'))}:$PATH"]
    lines += ["# Job's end time in epoch seconds, minus a reserve; launch prefers the scheduler's end time.",
              f"export {ENDS_AT_VARIABLE}=$(($(date +%s) + {time_s - min(_RESERVE_S, time_s // _RESERVED_PART)}))"]
    return lines


def _is_exported(name: str) -> bool:
    is_needed = name in (*FORWARDED, *_ENVIRONMENT_VARIABLES) or name.startswith(FORWARDED_PREFIXES)
    return is_needed and name not in _NOT_EXPORTED


def remove_job_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables of the job that submit runs in.

    Slurm would pass them on, and the new job would use them as its own.
    """
    if not scheduler_here(env):
        return dict(env)
    all_schedulers = schedulers().values()
    prefixes = (*_MPI_PREFIXES, *(prefix for scheduler in all_schedulers for prefix in scheduler.JOB_PREFIXES))
    user_variables = {name for scheduler in all_schedulers for name in scheduler.USER_VARIABLES}
    return {name: value for name, value in env.items()
            if name not in _LAUNCH_VARIABLES and (name in user_variables or not name.startswith(prefixes))}
