"""Protocol of a scheduler, as launch and submit use it, and the reservation that it tells of.

A scheduler is a module of ours (in `SCHEDULERS`), or an object that derives from `Scheduler`, which an installed
package names in its entry points under "ezpz_llm.schedulers"."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from ezpz_llm.base import UserError
from ezpz_llm.launch.ranks import Family


@dataclass(frozen=True)
class Host:
    """One host of the reservation.

    `slots` is the number of ranks that the reservation or the hostfile asks for on it, None where neither says;
    `devices` and `cores` are the accelerators and the CPUs that the scheduler gave there, None where it does not
    say.
    """

    name: str
    slots: int | None = None
    devices: int | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Where ranks may run.

    `ends_at` is in epoch seconds, None where no end is known. `source` names the variables or the file that
    said all this. `step_id` is the Slurm step that this process itself is in, which holds resources of the job that
    its own steps need. `slots_are_a_limit` is true where more ranks than slots would break the user's own words.
    `devices_source` says where the hosts' devices are from, `slots_source` where their slots are from, if not from
    `source`.
    """

    scheduler: str
    job_id: str | None
    hosts: tuple[Host, ...]
    ends_at: float | None
    source: str
    slots_are_a_limit: bool = False
    devices_source: str = ""
    step_id: str | None = None
    notes: tuple[str, ...] = ()
    slots_source: str = ""

    def with_notes(self, *notes: str) -> Allocation:
        """The same, with more notes."""
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True)
class Request:
    """A job that submit asks for.

    `time_s` is the limit in seconds; `devices` the accelerators of a node, None where the site does not say;
    `output` the folder for what the job prints."""

    name: str
    nodes: int
    time_s: int
    output: Path
    account: str | None
    queue: str | None
    reservation: str | None
    requeue: bool
    devices: int | None


@dataclass(frozen=True)
class HostsLine:
    """A shell command that writes a job's hosts into the file `hosts`, for who has to name them. It reads
    `variable` alone, which names a file where `is_file`, and needs `program` on PATH."""

    variable: str
    command: str
    program: str = "sh"
    is_file: bool = False

    def works(self, env: Mapping[str, str]) -> bool:
        """Can it be typed in `env`?"""
        value = env.get(self.variable)
        return (bool(value) and (not self.is_file or os.access(str(value), os.R_OK))
                and shutil.which(self.program, path=env.get("PATH", os.defpath)) is not None)


def by_hand(lines: Sequence[HostsLine], env: Mapping[str, str], failed: str = "") -> str:
    """What to type in `env`, a job whose hosts launch cannot tell: the first of `lines` that works there. That of
    the variable `failed` does not, whatever it holds."""
    first = next((line.command for line in lines if line.variable != failed and line.works(env)),
                 "write the job's hosts into a file named hosts, one a line")
    return (f"{first}; launch --hostfile hosts …   (--hosts LIST names them on the line; --scheduler none keeps to"
            " this host)")


def unspoken(title: str, job: str, why: str, where: str, instead: str) -> UserError:
    """A job whose hosts cannot be told is refused with its scheduler's name: never one rank in silence."""
    return UserError(f"this is {title} job {job}, and its hosts cannot be told: {why}", where=where,
                     instead=instead)


def job_of(title: str) -> str:
    """"a PBS job", "an LSF job"."""
    return f"{'an' if title[0] in ('AEFHILMNORSX' if title.isupper() else 'AEIOU') else 'a'} {title} job"


# Times as the schedulers write them.
def local_time(text: str, form: str) -> float | None:
    """Epoch seconds of a local time as a scheduler prints it, without a zone; None where it is none."""
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None


def clock(seconds: int) -> str:
    """H:MM:SS, as both schedulers read it; the hours may have any number of digits."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def clock_with_days(seconds: int) -> str:
    """D-HH:MM:SS from one day on, which Slurm prefers to many hours; else H:MM:SS."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}" if days else clock(rest)


# The protocol.
@dataclass(frozen=True)
class StepLauncher:
    """A scheduler's own program that starts ranks: its name on PATH, which is also the launcher's kind, and `build`
    from that program and `launch.dialects.work.Work` to a `Built` command line. Where it is `optional`, an mpiexec
    starts the ranks of a job that has no such program. `ranks` are the variables by which it tells a rank its
    place, None where `launch.ranks.FAMILIES` has them."""

    program: str
    dialect: str
    build: Callable[[str, Any], Any]
    optional: bool = False
    ranks: Family | None = None


def _no_scripts(title: str) -> UserError:
    return UserError(f"submit writes no job scripts for {title}", instead="write one with a line of launch in it")


class Scheduler(Protocol):
    """A scheduler, as launch (inside a job) and submit (outside of any) see it. A class that derives from this has
    what fits a scheduler without steps of its own.

    Attributes:
        NAME: by which --scheduler and site files name it.
        TITLE: its name in messages.
        JOB_VARIABLE: set in its jobs, to the job's id.
        ALIASES: other variables that are set in its jobs, in the place of that one or beside it.
        TRACES: variables that only its jobs have, which say whose job it is even where none of those above is set.
        HOSTS_LINES: shell commands that write the job's hosts into the file `hosts`, the best first.
        JOB_QUERY: words that ask for the job whose id is appended, and what is answered of one that is over.
        KEEPS_HOST_ORDER: its step launcher numbers nodes in the job's order, whatever order it is told.
        STARTS_MPI_DAEMONS: mpiexec's daemons are started by srun in its jobs.
        REMOTE_SHELL: the words that start a command on a host of the job, where mpiexec's daemons need it: ssh may
            be forbidden there.
        SITE_CORES_COUNT: where a site lists its cores, a job has them all, whatever number of CPUs it states.
        COPIER: the program that `copy_to_nodes` needs on PATH; None where there is none.
        PROGRAM, TEMPLATE, DIRECTIVE: what queues a script, the script's template (of `jobs/`, or an absolute path),
            and how its directive lines begin; empty where submit writes no scripts for it.
        TAKES_STDIN: PROGRAM reads the script from its standard input.
        AGAIN: words by which a running job asks to be queued again, and what stands for them in the script.
        PATTERNS: what it writes about a run's end: kinds (failures/log_kinds.py), each with a regular expression
            whose groups `host`, `ranks`, `code`, `number` (of a signal) and `signal` (by name) say more.
        HINTS: patterns of what PROGRAM complains of, each with the option of ours that it is about.
    """

    NAME: str
    TITLE: str
    JOB_VARIABLE: str
    JOB_QUERY: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    ALIASES: tuple[str, ...] = ()
    TRACES: tuple[str, ...] = ()
    HOSTS_LINES: tuple[HostsLine, ...] = ()
    KEEPS_HOST_ORDER: bool = False
    STARTS_MPI_DAEMONS: bool = False
    REMOTE_SHELL: tuple[str, ...] = ()
    SITE_CORES_COUNT: bool = False
    COPIER: str | None = None
    PROGRAM: str = ""
    TEMPLATE: str = ""
    DIRECTIVE: str = ""
    TAKES_STDIN: bool = False
    AGAIN: Mapping[str, str] = MappingProxyType({})
    PATTERNS: tuple[tuple[str, str], ...] = ()
    HINTS: tuple[tuple[str, str], ...] = ()

    def mark(self, env: Mapping[str, str]) -> str | None:
        """The variable that says that `env` is in a job of this scheduler; None outside one."""
        return next((name for name in (self.JOB_VARIABLE, *self.ALIASES) if env.get(name)), None)

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """The job that `env` is in, from the environment and files it names alone; None outside one.

        Raises:
            UserError: the variables cannot be understood.
        """

    def supplement(self, allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
        """`allocation` with what only the scheduler's own command knows; a note, never an error, without it."""
        return allocation

    def step_launcher(self) -> StepLauncher | None:
        """What `--launcher auto` takes in its jobs; None for an mpiexec or torchrun."""
        return None

    def site_notes(self, env: Mapping[str, str], of_site: Mapping[str, str]) -> tuple[str, ...]:
        """Where a site's variables contradict what the job was asked with."""
        return ()

    def own_step(self, env: Mapping[str, str]) -> str | None:
        """The id of the step that this process is in, where steps can be ended by id."""
        return None

    def kill_steps(self, steps: Sequence[str]) -> None:
        """Send SIGKILL to all processes of these steps."""
        assert not steps, "no step has an id"

    def steps_are_over(self, steps: Sequence[str]) -> bool:
        """Has the last process of each of these steps gone, for certain?"""
        return False

    def cancellations(self, env: Mapping[str, str], since: float) -> str:
        """What the scheduler wrote about the end of this job since that epoch time, which launch did not see."""
        return ""

    def copy_to_nodes(self, source: Path, target: str) -> bool:
        """Copy a file to each node of the job; False, with the reason on stderr, where that failed."""
        return False

    def time_limit(self, seconds: int) -> str:
        """A job's limit as its directives take it: H:MM:SS, unless it has a way of its own."""
        return clock(seconds)

    # Asked for only where PROGRAM is not empty.
    def directives(self, request: Request) -> list[str]:
        """The lines of a job that no site has anything to add to."""
        raise _no_scripts(self.TITLE)

    def subjects(self, line: str) -> set[str]:
        """What a directive line decides: of two lines with the same subject only one may stay."""
        raise _no_scripts(self.TITLE)

    def submission(self, script: str, after: str | None) -> list[str]:
        """The command that queues `script`, to begin after the job `after` has ended in whatever way."""
        raise _no_scripts(self.TITLE)

    def job_id(self, line: str) -> str | None:
        """The id in a line that `submission` printed; None where it is none."""
        raise _no_scripts(self.TITLE)

    def watch(self, ids: list[str]) -> str:
        """The command that shows these jobs."""
        raise _no_scripts(self.TITLE)

    def cancel(self, ids: list[str]) -> str:
        """The command that ends these jobs."""
        raise _no_scripts(self.TITLE)

    def output_file(self, request: Request, job: str) -> str:
        """Where that job's output goes."""
        raise _no_scripts(self.TITLE)

    def hint(self, words: str) -> str | None:
        """The option of ours that a complaint is about, where it can be told."""
        return next((option for pattern, option in self.HINTS if re.search(pattern, words, re.IGNORECASE)), None)


class ModuleScheduler(Scheduler):
    """A scheduler that is a module; what the module leaves out is as in `Scheduler`."""

    def __init__(self, module: ModuleType) -> None:
        vars(self).update(vars(module))
