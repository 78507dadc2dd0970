"""No scheduler of ours: this process is a rank already, or has this node alone; others' jobs are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.ranks import RankInfo, find_rank, leftovers
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host

NAME, STARTED = "none", "started"
"""Names of an allocation without a scheduler, and of one in which a launcher such as srun has started this very
process as one of several ranks."""


def detect(env: Mapping[str, str]) -> Allocation:
    """This host, always."""
    return Allocation(scheduler=NAME, job_id=None, hosts=(Host(socket.gethostname()),), ends_at=None,
                      source="no scheduler's variables in the environment")


def detect_rank(env: Mapping[str, str]) -> Allocation | None:
    """This host with the ranks that are already on it, where the world is larger than one.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    info = rank_here(env)
    if info.world_size == 1 or _is_typed(info, env):
        return None
    return Allocation(scheduler=STARTED, job_id=None, hosts=(Host(socket.gethostname(), slots=info.local_size),),
                      ends_at=None, source=info.source, notes=info.notes)


def rank_here(env: Mapping[str, str]) -> RankInfo:
    """The rank that this process is, `leftovers` left aside.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    left = leftovers(env)
    return find_rank({name: value for name, value in env.items() if name not in left})


def _is_typed(info: RankInfo, env: Mapping[str, str]) -> bool:
    """Is this the shell of `srun --pty`, which is task 0 of several whose others have no terminal? The tasks of a
    step inside it inherit the variable, but not the terminal."""
    return info.source.startswith("srun") and bool(env.get("SLURM_PTY_PORT")) and has_terminal()


def has_terminal() -> bool:
    """Has this process a controlling terminal, whatever its input and output are?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


# Schedulers that launch does not speak: their jobs are recognised, and refused with what to type.
@dataclass(frozen=True)
class Foreign:
    """One scheduler. All of `variables` are set in its jobs; the first has the job's number. `hosts_file` is the
    shell command that writes the job's hosts into the file `hosts`, by the scheduler's documentation."""

    name: str
    variables: tuple[str, ...]
    hosts_file: str


FOREIGN = (
    Foreign("LSF", ("LSB_JOBID",), "echo $LSB_MCPU_HOSTS | xargs -n 2 printf '%s slots=%s\\n' > hosts"),
    Foreign("Flux", ("FLUX_JOB_ID",), "flux hostlist --expand local | tr ' ' '\\n' > hosts"),
    Foreign("Cobalt", ("COBALT_JOBID",), 'cp "$COBALT_NODEFILE" hosts'),
    Foreign("Grid Engine", ("JOB_ID", "PE_HOSTFILE"), "awk '{print $1\" slots=\"$2}' \"$PE_HOSTFILE\" > hosts"),
    # Its file has a line for each core.
    Foreign("OAR", ("OAR_JOBID",), 'uniq "$OAR_NODEFILE" > hosts'),
    Foreign("PJM", ("PJM_JOBID",), 'cp "$PJM_O_NODEINF" hosts'),
)


def find(env: Mapping[str, str]) -> Foreign | None:
    """The scheduler in whose job this is."""
    return next((one for one in FOREIGN if all(env.get(name) for name in one.variables)), None)


def left_aside(env: Mapping[str, str], why: str) -> tuple[str, ...]:
    """A note for a job that an option of the user's overrides."""
    found = find(env)
    return (f"{found.variables[0]}={env[found.variables[0]]} left aside ({why})",) if found else ()


def refuse(env: Mapping[str, str]) -> None:
    """Never one rank on one host in silence, where a job has more.

    Raises:
        UserError: this is a job of one of these schedulers.
    """
    if found := find(env):
        name = found.variables[0]
        raise UserError(f"this is {found.name} job {env[name]}, and launch does not speak {found.name}: it cannot"
                        " tell the job's hosts", where=f"{name}={env[name]}",
                        instead=f"{found.hosts_file}; launch --hostfile hosts …   (--hosts LIST names them on the"
                                " line; --scheduler none keeps to this host)")
