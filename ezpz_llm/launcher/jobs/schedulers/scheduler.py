"""Base classes of schedulers, for launch and for submit, and the allocation that a scheduler reports.

Each scheduler of this package is a class in a module of its own. An installed package registers an instance of its
class as an entry point under "ezpz_llm.schedulers"."""

from __future__ import annotations

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.ranks import Family


class Place(Enum):
    """Place that a value describes. The value holds only there."""

    JOB = "each node of the job"
    """The scheduler's variables or commands state the value of each node."""
    STEP = "the step of this process"
    NODE = "this node, assumed of the others"
    """Drivers, variables, or /proc of this node. Other nodes may differ, and no launcher may be asked for it."""
    SITE = "each node of the site"
    USER = "all nodes, chosen by the user"


class Origin(NamedTuple):
    """Variable, command, or file that a value of the nodes was read from, and the place that it describes."""

    source: str
    place: Place


class Node(NamedTuple):
    """Node of an allocation.

    Attributes:
        slots: ranks that the job or the hostfile requests on the node; None if unspecified.
        devices: accelerators that a step may use there; None if unknown.
        cores: CPUs that the scheduler allocated there; None if unknown.
        slots_count_cores: the slots may be the node's cores instead of a number of ranks.
    """

    name: str
    slots: int | None = None
    devices: int | None = None
    cores: int | None = None
    slots_count_cores: bool = False


class Allocation(NamedTuple):
    """Nodes that ranks may run on.

    Attributes:
        ends_at: the job's end time in epoch seconds; None if unknown.
        source: the variables or the file that the allocation was read from.
        slots_are_a_limit: the user set the slots, so that more ranks than slots are an error.
        devices_from: origin of the number of devices, also if steps cannot request them; None if unknown.
        step_id: the Slurm step that this process is in. It holds resources of the job that new steps need.
        slots_from: origin of the nodes' `slots`, if not `source`.
        cores_from: origin of the nodes' `cores`; None if unknown.
        devices_per_rank: accelerators that the job requests for each rank; None if it does not.
    """

    scheduler: str
    job_id: str | None
    hosts: tuple[Node, ...]
    ends_at: float | None
    source: str
    slots_are_a_limit: bool = False
    devices_from: Origin | None = None
    step_id: str | None = None
    notes: tuple[str, ...] = ()
    slots_from: Origin | None = None
    cores_from: Origin | None = None
    devices_per_rank: int | None = None

    def with_notes(self, *notes: str) -> Allocation:
        """Return a copy with more notes."""
        return self._replace(notes=(*self.notes, *notes))


class Request(NamedTuple):
    """Job that submit requests.

    Attributes:
        time_s: time limit in seconds.
        output: folder for the job's output file.
        gpus_per_node: accelerators per node that submit's own directives request; None if the site's directives do,
            or if nothing requests them.
    """

    name: str
    nodes: int
    time_s: int
    output: Path
    account: str | None
    queue: str | None
    reservation: str | None
    requeue: bool
    gpus_per_node: int | None


class HostfileCommand(NamedTuple):
    """Shell command, shown to the user, that writes a job's nodes to the file `hosts`.

    Attributes:
        variable: the only environment variable that the command reads; the path of a file if `is_file`.
        program: must be on PATH.
    """

    variable: str
    command: str
    program: str = "sh"
    is_file: bool = False

    def is_usable(self, env: Mapping[str, str]) -> bool:
        """Return True if the command works in `env`."""
        value = env.get(self.variable)
        return (bool(value) and (not self.is_file or os.access(str(value), os.R_OK))
                and shutil.which(self.program, path=env.get("PATH", os.defpath)) is not None)


def manual_instructions(lines: Sequence[HostfileCommand], env: Mapping[str, str], failed: str = "") -> str:
    """Return what to type in a job (`env`) whose nodes launch cannot determine.

    That is the first of `lines` that works in `env` and does not read the variable `failed`.
    """
    first = next((line.command for line in lines if line.variable != failed and line.is_usable(env)),
                 "write the job's nodes to a file named hosts, one per line")
    return (f"{first}; launch --hostfile hosts …   (or list them with --hosts LIST; --scheduler none runs on this"
            " node only)")


def job_of(title: str) -> str:
    """Return `title` as in "a PBS job" or "an LSF job"."""
    return f"{'an' if title[0] in ('AEFHILMNORSX' if title.isupper() else 'AEIOU') else 'a'} {title} job"


def parse_local_time(text: str, form: str) -> float | None:
    """Parse a local time without a time zone, as schedulers print it. Return epoch seconds, or None."""
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None


def clock(seconds: int) -> str:
    """Format a duration as H:MM:SS, with any number of digits for the hours."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def clock_with_days(seconds: int) -> str:
    """Format a duration for Slurm: D-HH:MM:SS from one day on, else H:MM:SS."""
    days, seconds = divmod(seconds, 86400)
    if not days:
        return clock(seconds)
    return f"{days}-{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class StepLauncher(NamedTuple):
    """Program of a scheduler that starts ranks, such as srun.

    Attributes:
        program: its name on PATH, which is also the launcher's kind.
        dialect: title of its command line's dialect (`launch.dialects`).
        optional: if the program is not on PATH, mpiexec starts the ranks.
        ranks: variables that tell a rank its number; None if `launch.ranks.FAMILIES` has them.
    """

    program: str
    dialect: str
    optional: bool = False
    ranks: Family | None = None


class Scheduler(ABC):
    """Scheduler, as launch uses it inside a job. The defaults suit schedulers without steps.

    Attributes:
        NAME: its name for --scheduler and in site files.
        TITLE: its name in messages.
        JOB_VARIABLE: environment variable with the job's id, set in its jobs.
        ALIASES: other variables that mark its jobs, instead of or beside JOB_VARIABLE.
        TRACES: variables that only its jobs have. They identify the scheduler if JOB_VARIABLE and ALIASES are
            missing.
        JOB_PREFIXES: prefixes of its variables, which describe one job and are not passed on to another.
        USER_VARIABLES: variables with such a prefix that configure its commands.
        CONFLICTING: variables of a job that its launcher rejects together with launch's options.
        SITE_VARIABLES: variables by which site files may identify the machine.
        HOSTFILE_COMMANDS: shell commands that write the job's nodes to the file `hosts`, the best first.
        COMMANDS: commands by which doctor finds the scheduler on PATH.
        KEEPS_NODE_ORDER: its step launcher always numbers nodes in the job's order.
        STARTS_MPI_DAEMONS: mpiexec starts its daemons with srun in its jobs.
        REMOTE_SHELL: command that runs another command on a node of the job, for mpiexec's daemons, since the site
            may forbid ssh.
        SITE_CORES_COUNT: if the site file lists cores, a job has all of them, whatever its variables state.
        COPIER: the program that `copy_to_nodes` needs on PATH; None if copying is unsupported.
        PATTERNS: messages of the scheduler about the end of a run: kinds (failures/log_kinds.py), each with a
            regular expression whose groups may be `host`, `ranks`, `code`, `number` (of a signal), `signal` (its
            name), `job`, `step` (JOB.STEP), `reporter` (a node), and `time` (YYYY-MM-DDTHH:MM:SS).
    """

    NAME: str
    TITLE: str
    JOB_VARIABLE: str
    ALIASES: tuple[str, ...] = ()
    TRACES: tuple[str, ...] = ()
    JOB_PREFIXES: tuple[str, ...] = ()
    USER_VARIABLES: tuple[str, ...] = ()
    CONFLICTING: tuple[str, ...] = ()
    SITE_VARIABLES: tuple[str, ...] = ()
    HOSTFILE_COMMANDS: tuple[HostfileCommand, ...] = ()
    COMMANDS: tuple[str, ...] = ()
    KEEPS_NODE_ORDER: bool = False
    STARTS_MPI_DAEMONS: bool = False
    REMOTE_SHELL: tuple[str, ...] = ()
    SITE_CORES_COUNT: bool = False
    COPIER: str | None = None
    PATTERNS: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of the job that `env` is in; None outside a job.

        Reads only the environment and the files that it names.

        Raises:
            UserError: the variables are invalid.
        """

    def unknown_nodes_error(self, job: str, why: str, where: str, env: Mapping[str, str],
                            failed: str = "") -> UserError:
        """Return the error for a job whose nodes cannot be determined. Running one rank here would hide that.

        Args:
            failed: variable that cannot be used.
        """
        return UserError(f"cannot determine the nodes of {self.TITLE} job {job}: {why}", where=where,
                         instead=manual_instructions(self.HOSTFILE_COMMANDS, env, failed))

    def mark(self, env: Mapping[str, str]) -> str | None:
        """Return the variable that marks `env` as a job of this scheduler; None outside a job."""
        return next((name for name in (self.JOB_VARIABLE, *self.ALIASES) if env.get(name)), None)

    def supplement(self, allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
        """Add facts that only the scheduler's commands report. Add a note if a command fails; never raise."""
        return allocation

    def step_launcher(self) -> StepLauncher | None:
        """Return the launcher that `--launcher auto` uses in its jobs; None for mpiexec or torchrun."""
        return None

    def site_notes(self, env: Mapping[str, str], of_site: Mapping[str, str]) -> tuple[str, ...]:
        """Return notes on site variables that contradict the options of the job."""
        return ()

    def sets_variable(self, name: str, env: Mapping[str, str]) -> bool:
        """Return True if the scheduler, not the user, set a variable that launch sets too, or a device mask."""
        return False

    def restart_count(self, env: Mapping[str, str]) -> int:
        """Return how often the job has been requeued; 0 if that is unknown."""
        return 0

    def local_folder(self, env: Mapping[str, str]) -> Path | None:
        """Return the job's folder on each node's local disk, if it has one."""
        return None

    def mpi_advice(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the reason why a rank of its step launcher is alone in its MPI world, and the fix, or None."""
        return None

    def own_step(self, env: Mapping[str, str]) -> str | None:
        """Return the id of the step that this process is in; None if steps cannot be ended by id."""
        return None

    def kill_steps(self, steps: Sequence[str]) -> None:
        """Send SIGKILL to all processes of these steps."""
        assert not steps, "steps have no ids"

    def steps_are_over(self, steps: Sequence[str]) -> bool:
        """Return True if the last process of each of these steps has certainly ended."""
        return False

    def cancellations(self, env: Mapping[str, str]) -> list[str]:
        """Return lines about the end of this job that the scheduler wrote elsewhere; earlier attempts' too."""
        return []

    def copy_to_nodes(self, source: Path, target: str) -> bool:
        """Copy a file to each node of the job. On failure print the reason to stderr and return False."""
        return False


class BatchScheduler(Scheduler):
    """Scheduler for which submit writes and queues job scripts.

    Attributes:
        PROGRAM: the submit command.
        TEMPLATE: the script template (in `jobs/`, or an absolute path).
        DIRECTIVE: the prefix of directive lines.
        TAKES_STDIN: PROGRAM reads the script from standard input.
        AGAIN: words with which a running job requeues itself, and their replacements in the script.
        HINTS: patterns of PROGRAM's error messages, each with the option of submit that sets the rejected value.
        ARRAY_SUFFIX: shell text that expands to "-INDEX" in an element of a job array, else to nothing.
    """

    PROGRAM: str
    TEMPLATE: str
    DIRECTIVE: str
    TAKES_STDIN: bool = False
    AGAIN: Mapping[str, str] = MappingProxyType({})
    HINTS: tuple[tuple[str, str], ...] = ()
    ARRAY_SUFFIX: str = ""

    @abstractmethod
    def directives(self, request: Request) -> list[str]:
        """Return the directive lines of a job, without those of the site.

        Raises:
            UserError: a directive cannot hold a value of the request.
        """

    @abstractmethod
    def subjects(self, line: str) -> set[str]:
        """Return names of the settings in a directive line.

        If lines of submit and of the site have a name in common, the script keeps only one of these lines.
        """

    @abstractmethod
    def submission(self, script: str, after: str | None) -> list[str]:
        """Return the command that submits `script`, to start after the job `after` has ended in any way."""

    @abstractmethod
    def job_id(self, line: str) -> str | None:
        """Return the job id in a line that the `submission` command printed, or None."""

    @abstractmethod
    def watch(self, ids: list[str]) -> str:
        """Return the command that shows these jobs."""

    @abstractmethod
    def cancel(self, ids: list[str]) -> str:
        """Return the command that cancels these jobs."""

    def output_file(self, request: Request, job: str) -> str:
        """Return the path of the job's output file: job-ID.log by default."""
        return str(request.output / f"job-{job}.log")

    def time_limit(self, seconds: int) -> str:
        """Format a time limit for a directive line: H:MM:SS by default."""
        return clock(seconds)

    def variables_of_jobs(self, submit_host: str) -> dict[str, str]:
        """Return site variables that a job submitted on this host will have."""
        return {}

    def hint(self, words: str) -> str | None:
        """Return the option of submit for the value that an error message of PROGRAM rejects, or None."""
        return next((option for pattern, option in self.HINTS if re.search(pattern, words, re.IGNORECASE)), None)
