"""Handing a script to the scheduler, and reading the id that it gives the job."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from ezpz_llm.errors import UserError

_TIMEOUT_S = 120


class RefusedError(UserError):
    """The scheduler did not take the job, for certain."""


def queue_chain(scheduler: ModuleType, script: Path, count: int, env: Mapping[str, str]) -> Iterator[str]:
    """Queue the script `count` times, each job to begin when the one before has ended; the ids, one after another.

    Raises:
        RefusedError: the scheduler refuses a job.
        UserError: it does not answer, or does not say an id.
    """
    after: str | None = None
    for number in range(1, count + 1):
        after = _queue(scheduler, scheduler.submission(str(script), after), number, env)
        yield after


def _queue(scheduler: ModuleType, words: list[str], number: int, env: Mapping[str, str]) -> str:
    program = words[0]
    earlier = f" (job {number} of the chain; the earlier ones are queued)" if number > 1 else ""
    try:
        done = subprocess.run(words, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=_TIMEOUT_S, check=False)
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
        raise RefusedError(f"{program} refused the job with code {done.returncode}{earlier}",
                           where=shlex.join(words), exit_code=1,
                           instead=f"{change} `{program}` it by hand: ezpz-llm submit --dry-run prints it")
    # A site's wrapper may print more than the id.
    found = [job for line in done.stdout.splitlines() if (job := scheduler.job_id(line.strip()))]
    if len(found) != 1:
        raise UserError(f"{program} printed no job id but {done.stdout!r}{earlier}", where=words[-1], exit_code=1,
                        instead="look whether the job is in the queue")
    return found[0]
