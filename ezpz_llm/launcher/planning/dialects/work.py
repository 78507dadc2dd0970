"""Launcher-independent description of the ranks to start, and the command line of a single rank."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.jobs.schedulers import schedulers
from ezpz_llm.launcher.planning.placement import Placement
from ezpz_llm.launcher.planning.rank_binding import Binding, CoreOption

MAX_INLINE_HOSTS = 8
"""Longer node lists go into a file in the run directory."""

REMOTE_SHELL = "the scheduler's remote shell starts the daemons: ssh may be forbidden on its nodes"
"""Reason that the plan shows for a remote shell in mpiexec's options."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Work(NamedTuple):
    """Ranks to start.

    Attributes:
        command: the rank shim with the user's command.
        here: True if all ranks run on this node, so that no hostname is needed.
        cores_per_rank: cores per rank, in the scheduler's unit, which may be hardware threads; None if unknown.
        variables: names of environment variables that ranks on other nodes need too.
        cores_per_node: cores per node, in the same unit; None if unknown.
        site_options: the site file's options for the launcher.
        master: address and port of the rendezvous.
        env: launch's own environment, in which the launcher finds the user's settings.
        devices: accelerators on each of `hosts` that a step may use; None if unknown.
        devices_per_rank: accelerators that the job requests for each rank; None if it does not.
    """

    command: tuple[str, ...]
    placement: Placement
    here: bool
    node_list_path: Path
    cores_per_rank: int | None
    variables: Sequence[str]
    as_root: bool
    scheduler: str = "none"
    cores_per_node: int | None = None
    binding: Binding = Binding()
    site_options: tuple[str, ...] = ()
    master: tuple[str, int | None] = ("127.0.0.1", None)
    env: Mapping[str, str] = {}
    devices: tuple[int | None, ...] = ()
    devices_per_rank: int | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hostnames, in the order in which ranks are numbered."""
        return tuple(name for name, _ in self.placement.ranks)

    @property
    def starts_daemons_by_srun(self) -> bool:
        """True if mpiexec starts its daemons with srun, as in Slurm jobs."""
        scheduler = schedulers().get(self.scheduler)
        return scheduler is not None and scheduler.STARTS_MPI_DAEMONS

    @property
    def remote_shell(self) -> tuple[str, ...]:
        """Command with which mpiexec starts its daemons on other nodes, if it is on PATH; empty for ssh."""
        scheduler = schedulers().get(self.scheduler)
        command = scheduler.REMOTE_SHELL if scheduler and not self.here else ()
        program = shutil.which(command[0], path=self.env.get("PATH", os.defpath)) if command else None
        return (program, *command[1:]) if program else ()

    def node_list_file(self, lines: Sequence[str]) -> dict[Path, str]:
        """Return the launcher's hostfile and its content, with one of `lines` per line."""
        return {self.node_list_path: "".join(f"{line}\n" for line in lines)}


class Built(NamedTuple):
    """Command line of a launcher.

    `env` maps variables that the launcher needs to (value, reason); variables of the user are kept. `files` must be
    written first.
    """

    argv: tuple[str, ...]
    env: Mapping[str, tuple[str, str]] = {}
    files: Mapping[Path, str] = {}


class Dialect(NamedTuple):
    """Command line of a launcher, such as srun or MPICH's mpiexec.

    Attributes:
        title: its name in messages, in the plan, and for `StepLauncher.dialect`.
        first_line: regular expression for the start of the first line of `mpiexec --version`; the group `version`
            is optional. None for a launcher that is not an mpiexec.
        build: maps the program and the work to a command line.
        site_name: its name in site files, for an mpiexec whose version text is unknown; may be empty.
        cores: its option that binds ranks to cores.
        device_options: its options that select the device of each rank.
        runs_mpi: MPI programs are known to work under it, so that --stage-env may broadcast over MPI.
    """

    title: str
    first_line: str | None
    build: Callable[[str, Work], Built]
    site_name: str = ""
    cores: CoreOption = CoreOption.LIST
    device_options: tuple[str, ...] = ()
    runs_mpi: bool = False


class Launcher(NamedTuple):
    """Program that starts ranks. `source` and `notes` explain to the user why it was chosen.

    Attributes:
        kind: name for --launcher ("mpiexec", "torchrun", or a step launcher's program), THIS_LAUNCH, or "none" for
            processes that are already ranks.
        version: version of an mpiexec; may be empty.
    """

    kind: str
    dialect: Dialect
    program: str
    source: str
    version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Dialect and version, such as "Open MPI 5.0.11"."""
        return f"{self.dialect.title} {self.version}".strip()

    def build(self, work: Work) -> Built:
        """Return the command line that does the work."""
        return self.dialect.build(self.program, work)


def validate_command(program: str, work: Work) -> None:
    """Check that `program` can accept the command and the hostnames.

    Raises:
        UserError: the command has an argument ":", with which mpiexec and srun start a second program; or a
            hostname is invalid.
    """
    if ":" in work.command:
        raise UserError(f"{Path(program).name} does not accept ':' as an argument: it separates programs",
                        where="the command", instead="put the command into a script, and launch the script")
    for name in work.hosts:
        if not _HOST.fullmatch(name):
            raise UserError(f"invalid hostname {name!r}", where="the nodes of the job",
                            instead="names of letters, digits, '.', '_' and '-'")


def mask(cores: str) -> str:
    """Return the hexadecimal bit mask of a core list: "0x10e" for "1-3,8"."""
    return hex(sum(1 << number for number in set(expand_numbers(cores))))


THIS_LAUNCH = "launch"
"""Launcher and dialect of ranks that launch starts itself."""
DIRECT = Dialect("none", None, lambda program, work: Built(work.command), cores=CoreOption.NONE)
"""Command line of a rank that needs no launcher, such as a single rank."""
