"""Job script: a template of `jobs/` filled in, with the user's environment, and handed to the scheduler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.base import SECRET_VARIABLE, UserError, data_dir
from ezpz_llm.launch.devices import MASKS
from ezpz_llm.launch.schedulers import scheduler_here
from ezpz_llm.launch.schedulers.scheduler import Scheduler
from ezpz_llm.launch.variables import (
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
from ezpz_llm.rundir import RUN_DIR_VARIABLE, hide, redact, secret_values

_HEADING = re.compile(r"^# ---- (\w+).*\n", re.MULTILINE)


def fill_template(name: str, introduction: str, sections: dict[str, list[str]]) -> str:
    """The template `name` with its introduction and the named sections replaced; the others stay as they are."""
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
    """Our directives, less those that the site words differently, and then the site's with `values` in the place of
    {names}. A site that has its own line with {queue} or {account} says by it how these are asked for.

    Raises:
        UserError: the site's lines need a value that was not given.
    """
    taken = set().union(*(subjects(line) for line in of_site))
    named = {name for line in of_site for name in re.findall(r"\{(\w+)\}", line)}
    said = [line for line in own if not subjects(line) & taken and not _says_one_of(line, named, values)]
    return said + [_filled(line, values, site) for line in of_site]


def _says_one_of(line: str, named: set[str], values: dict[str, str | None]) -> bool:
    words = re.split(r"[=\s]", line)
    return any(values.get(name) is not None and words[-1] == values[name]
               for name in named & {"account", "queue", "reservation"})


def _filled(line: str, values: dict[str, str | None], site: str) -> str:
    def value(match: re.Match[str]) -> str:
        """What stands for `{name}` in a site's directive."""
        if match[1] not in values:
            raise UserError(f"unknown place {match[0]} in a directive: {line!r}", where=f"site {site}",
                            instead=" ".join(f"{{{name}}}" for name in values))
        if values[match[1]] is None:
            raise UserError(f"site {site} needs --{match[1]}", where=f"its directive {line!r}",
                            instead=f"ezpz-llm submit --{match[1]} … ")
        return str(values[match[1]])

    return re.sub(r"\{(\w+)\}", value, line)


def array_lines(name: str, words: Sequence[str], replaced: dict[str, str]) -> list[str]:
    """A bash array of `words`, exactly as they are; the words of `replaced` as the shell text that stands there.
    Words are put several to a line, for the sake of whoever reads it."""
    lines, line = [], f"{name}=("
    for position, word in enumerate(words):
        text = replaced.get(word) or shlex.quote(word)
        if position and len(line) + len(text) > 110:
            lines.append(line)
            line = "    "
        line += ("" if line.endswith(("(", "    ")) else " ") + text
    return [*lines, f"{line})"]


# Handing a script to the scheduler, and reading the id that it gives the job.
_TIMEOUT_S = 120


class RefusedError(UserError):
    """The scheduler did not take the job, for certain."""


def queue_chain(scheduler: Scheduler, script: Path, count: int, env: Mapping[str, str]) -> Iterator[str]:
    """Queue the script `count` times, each job to begin when the one before has ended; the ids, one after another.

    Raises:
        RefusedError: the scheduler refuses a job.
        UserError: it does not answer, or does not say an id.
    """
    after: str | None = None
    for number in range(1, count + 1):
        after = _queue(scheduler, scheduler.submission(str(script), after), number, env)
        yield after


def _queue(scheduler: Scheduler, words: list[str], number: int, env: Mapping[str, str]) -> str:
    program = words[0]
    earlier = f" (job {number} of the chain; the earlier ones are queued)" if number > 1 else ""
    try:
        with open(words[-1] if scheduler.TAKES_STDIN else os.devnull, "rb") as given:
            done = subprocess.run(words[:-1] if scheduler.TAKES_STDIN else words, env=dict(env), stdin=given,
                                  capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise RefusedError(f"cannot run {program}: {error.strerror}", where="PATH", exit_code=1) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{program} did not answer within {_TIMEOUT_S} s{earlier}", where=words[-1], exit_code=1,
                        instead="look first whether the job is in the queue all the same") from error
    # The scheduler's own words, as they are.
    print(done.stderr, end="", file=sys.stderr, flush=True)
    if done.returncode:
        print(done.stdout, end="", file=sys.stderr, flush=True)
        option = scheduler.hint(done.stderr + done.stdout)
        change = f"another {option}, or change the script and" if option else "change the script and"
        # Without the script's name: submit removes the run directory of a job that was never queued.
        raise RefusedError(f"{program} refused the job with code {done.returncode}{earlier}",
                           where=shlex.join(words[:-1]), exit_code=1,
                           instead=f"{change} `{program}` it by hand: ezpz-llm submit --dry-run prints it")
    # A site's wrapper may print more than the id.
    found = [job for line in done.stdout.splitlines() if (job := scheduler.job_id(line.strip()))]
    if len(found) != 1:
        raise UserError(f"{program} printed no job id but {done.stdout!r}{earlier}", where=words[-1], exit_code=1,
                        instead="look whether the job is in the queue")
    return found[0]


# The lines that give a job the environment of the shell that submitted it. PBS hands nothing on, and Slurm not on
# every site; so the script itself says what a run depends on. Secrets are left out.
_RESERVE_S, _RESERVED_PART = 60, 6
"""What may pass between a job's start, as its scheduler counts, and the first line of its script; of a short job no
more than this part."""

_OF_A_LAUNCH = (*MASKS, *RANKS_OWN, *TORCHS_OWN, RUN_DIR_VARIABLE, RUN_ID_VARIABLE, SECRET_VARIABLE,
                WORLD_SIZE_VARIABLE, RANKS_PER_NODE_VARIABLE, RANK_NAMES_VARIABLE, ENDS_AT_VARIABLE,
                TERMINAL_VARIABLE)
# The job has its own home, and PATH and the site get lines of their own.
_LEFT_OUT = ("HOME", "PATH", SITE_VARIABLE, *_OF_A_LAUNCH)
_OF_THE_ENVIRONMENT = ("CONDA_PREFIX", "MPI4PY_LIBMPI")
_OF_A_JOB = ("SLURM_", "PBS_", "FLUX_", "LSB_", "LSF_JOB", "PMI_", "PMIX_", "PALS_", "OMPI_", "HYDRA_")


def environment_lines(env: Mapping[str, str], folder: Path, setup: tuple[str, ...], time_s: int, *,
                      has_modules: bool) -> list[str]:
    """The job's environment as shell lines: the variables a run depends on, the site's own lines, and this Python
    first on PATH.

    Args:
        folder: the working directory.
        setup: the site's lines, as they are.
        time_s: the job's limit in seconds.
        has_modules: the site's lines load what the job needs, which comes before the PATH of the login node.
    """
    secrets = secret_values(env)
    lines = [f"cd {shlex.quote(str(folder))} || exit"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())
              if _is_carried(name) and redact(hide(value, secrets), name) == value]
    path = shlex.quote(env.get("PATH", os.defpath))
    lines += [*setup, f"export PATH=$PATH:{path}" if has_modules else f"export PATH={path}:$PATH"]
    # sys.prefix itself, not where a link leads to: the environment's own python3 and launch have to come first.
    lines += [f"export PATH={shlex.quote(os.path.join(sys.prefix, 'bin'))}:$PATH"]
    lines += ["# When the time is over, with a little to spare; launch replaces it by the scheduler's own word.",
              f"export {ENDS_AT_VARIABLE}=$(($(date +%s) + {time_s - min(_RESERVE_S, time_s // _RESERVED_PART)}))"]
    return lines


def _is_carried(name: str) -> bool:
    wanted = name in (*FORWARDED, *_OF_THE_ENVIRONMENT) or name.startswith(FORWARDED_PREFIXES)
    return wanted and name not in _LEFT_OUT


def outside_a_job(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for what queues a job, without what describes the job that submit itself runs in: Slurm would hand it
    on, and the new job would take it for its own."""
    if not scheduler_here(env):
        return dict(env)
    # By FLUX_URI flux finds the instance that it queues in: the one around, as sbatch in a job of Slurm's.
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "PBS_EXEC", "PBS_SERVER", "PBS_CONF_FILE", "PBS_DEFAULT", "FLUX_URI")
    return {name: value for name, value in env.items()
            if name not in _OF_A_LAUNCH and (name in kept or not name.startswith(_OF_A_JOB))}
