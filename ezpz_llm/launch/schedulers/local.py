"""No scheduler of ours: this process is a rank already, or has this node alone; others' jobs are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.base import UserError
from ezpz_llm.launch.ranks import RankInfo, find_rank, leftovers
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host, HostsLine, by_hand, job_of

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
    """One scheduler. Each of `variables` is set in its jobs alone; the first has the job's number. `hosts_lines`
    are by the scheduler's documentation."""

    name: str
    variables: tuple[str, ...]
    hosts_lines: tuple[HostsLine, ...]


FOREIGN = (
    # https://www.ibm.com/docs/en/tllm/5.1.0, "LoadLeveler variables for setting up the job environment".
    Foreign("LoadLeveler", ("LOADL_STEP_ID", "LOADL_PROCESSOR_LIST"),
            (HostsLine("LOADL_PROCESSOR_LIST", "printf '%s\\n' $LOADL_PROCESSOR_LIST > hosts"),)),
)


def find(env: Mapping[str, str]) -> tuple[Foreign, str] | None:
    """The scheduler in whose job this is, and the variable that says so."""
    return next(((one, name) for one in FOREIGN for name in one.variables if env.get(name)), None)


def left_aside(env: Mapping[str, str], why: str) -> tuple[str, ...]:
    """A note for a job that an option of the user's overrides."""
    found = find(env)
    return (f"{found[1]}={env[found[1]]} left aside ({why})",) if found else ()


def refuse(env: Mapping[str, str]) -> None:
    """Never one rank on one host in silence, where a job has more.

    Raises:
        UserError: this is a job of one of these schedulers.
    """
    if found := find(env):
        foreign, name = found
        job = f"{foreign.name} job {env[name]}" if name == foreign.variables[0] else job_of(foreign.name)
        raise UserError(f"this is {job}, and launch does not speak {foreign.name}: it cannot tell the job's hosts",
                        where=f"{name}={env[name][:80]}", instead=by_hand(foreign.hosts_lines, env))
