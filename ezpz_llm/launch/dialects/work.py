"""Work for a launcher, in words of none of them: ranks, core lists; and the dialect of a single rank."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.base import UserError
from ezpz_llm.launch.binding.choose import Binding
from ezpz_llm.launch.binding.topology import SYS, socket_and_siblings
from ezpz_llm.launch.hostlist import expand_numbers
from ezpz_llm.launch.placement import Placement
from ezpz_llm.launch.schedulers import schedulers

HOSTS_ON_THE_LINE = 8
"""Longer host lists go into a file in the run directory."""

SRUN_OVERLAP = ("--overlap --export=ALL",
                "the daemons' own srun must not wait for the step that launch may stand in")
"""Options of the srun by which an mpiexec starts its daemons, and why."""

REMOTE_SHELL = "daemons start by the scheduler's own remote shell: ssh may be forbidden on its hosts"
"""Why an mpiexec is told of one."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Work:
    """Ranks to start.

    `command` is the shim with the user's words; `here` is true where no host needs a name, since all ranks run
    on this one; `cores_per_rank` and `cores_per_host` are counted as the scheduler counts them (hardware threads,
    where it does) and None where they are not known; `variables` are the names that ranks on other hosts need
    too; `site_options` are the site's own words for the launcher; `master` is where ranks meet; `env` is launch's
    own environment, in which the launcher would find the user's choices; `devices_per_host` what the scheduler gave
    on each host, None where it does not say or hosts differ.
    """

    command: tuple[str, ...]
    placement: Placement
    here: bool
    hosts_file: Path
    cores_per_rank: int | None
    variables: Sequence[str]
    as_root: bool
    scheduler: str = "none"
    cores_per_host: int | None = None
    binding: Binding = field(default_factory=Binding)
    site_options: tuple[str, ...] = ()
    master: tuple[str, int | None] = ("127.0.0.1", None)
    env: Mapping[str, str] = field(default_factory=dict)
    devices_per_host: int | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in the order in which ranks are numbered."""
        return tuple(name for name, _ in self.placement.ranks)

    @property
    def starts_daemons_by_srun(self) -> bool:
        """Does an mpiexec start its daemons by srun, as in Slurm's jobs?"""
        scheduler = schedulers().get(self.scheduler)
        return scheduler is not None and scheduler.STARTS_MPI_DAEMONS

    @property
    def remote_shell(self) -> tuple[str, ...]:
        """The words by which the scheduler starts a command on a host of the job, where they are here and mpiexec's
        daemons need them; empty for ssh."""
        scheduler = schedulers().get(self.scheduler)
        words = scheduler.REMOTE_SHELL if scheduler and not self.here else ()
        found = shutil.which(words[0], path=self.env.get("PATH", os.defpath)) if words else None
        return (found, *words[1:]) if found else ()

    def file_of_hosts(self, lines: Sequence[str]) -> dict[Path, str]:
        """The file that names the hosts to a launcher, one a line."""
        return {self.hosts_file: "".join(f"{line}\n" for line in lines)}


@dataclass(frozen=True)
class Built:
    """A command line; the environment it needs besides (name to value and reason), where the user has not set it;
    files to write before."""

    argv: tuple[str, ...]
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, and how to talk to it. `notes` are what the user should know of the choice."""

    kind: str
    dialect: str
    program: str
    source: str
    build: Callable[[str, Work], Built]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """A make of mpiexec.

    Attributes:
        title: its name in messages and in the plan.
        first_line: regular expression that the first line of its `mpiexec --version` begins with; a group `version`
            says which version it is.
        build: from the program and the work to its command line.
        site_name: how a site file names it, for an mpiexec whose version text is not recognised; empty where none
            needs to.
    """

    title: str
    first_line: str
    build: Callable[[str, Work], Built]
    site_name: str = ""


def refuse_unspeakable(program: str, work: Work) -> None:
    """See that the command and the hosts can be named to `program` at all.

    Raises:
        UserError: a lone colon among the words, where every mpiexec and srun take it for the beginning of a second
            program; an invalid host name.
    """
    if ":" in work.command:
        raise UserError("an argument that is a lone ':' cannot be passed on, since it separates programs",
                        where=f"the command, as {Path(program).name} reads it",
                        instead="put the command into a script, and launch that")
    for name in work.hosts:
        if not _HOST.fullmatch(name):
            raise UserError(f"invalid host name {name!r}", where="the hosts of the reservation",
                            instead="names of letters, digits, '.', '_' and '-'")


# Core lists ("1-8,105") in the forms that launchers want.
def mask(cores: str) -> str:
    """The hexadecimal bit mask: "0x10e" for "1-3,8"."""
    return hex(sum(1 << number for number in set(expand_numbers(cores))))


def logical_cores(root: Path = SYS) -> dict[int, int]:
    """The system's number of each CPU of this host to the number of its core as hwloc counts: package by package,
    and the cores of one package by their lowest CPU. CPUs that this process may not use are left out, as hwloc
    leaves out those of other containers. Empty where /sys does not tell."""
    packages: dict[int, dict[str, list[int]]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        try:
            package, siblings = socket_and_siblings(number, root)
        except (OSError, ValueError):
            return {}
        packages.setdefault(package, {}).setdefault(siblings, []).append(number)
    cores = [threads for package in packages.values() for threads in package.values()]
    return {number: index for index, threads in enumerate(cores) for number in threads}


# A single rank, without any launcher.
def build(program: str, work: Work) -> Built:
    """The command itself."""
    return Built(work.command)
