"""Allocations without a supported scheduler: this process is already a rank, or uses only this node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.ranks import RankInfo, find_rank, leftover_variables
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    HostfileCommand,
    Node,
    job_of,
    manual_instructions,
)

NAME, STARTED = "none", "started"
"""Values of `Allocation.scheduler`: no scheduler; a launcher such as srun started this process as a rank."""


def detect(env: Mapping[str, str]) -> Allocation:
    """Return an allocation of this node only."""
    return Allocation(scheduler=NAME, job_id=None, hosts=(Node(socket.gethostname()),), ends_at=None,
                      source="no scheduler's variables in the environment")


def detect_rank(env: Mapping[str, str]) -> Allocation | None:
    """Return this node with the ranks that are already on it.

    None if the world size is 1, and in the shell of `srun --pty`.

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    info = rank_here(env)
    if info.world_size == 1 or _is_interactive_shell(info, env):
        return None
    return Allocation(scheduler=STARTED, job_id=None, hosts=(Node(socket.gethostname(), slots=info.local_size),),
                      ends_at=None, source=info.source, notes=info.notes)


def rank_here(env: Mapping[str, str]) -> RankInfo:
    """Return the rank of this process, ignoring stale variables (`leftover_variables`).

    Raises:
        UserError: the rank variables are incomplete or contradict each other.
    """
    stale = leftover_variables(env)
    return find_rank({name: value for name, value in env.items() if name not in stale})


def _is_interactive_shell(info: RankInfo, env: Mapping[str, str]) -> bool:
    """Return True in the shell of `srun --pty`, which is task 0; the other tasks have no terminal.

    Tasks of a step inside that shell inherit SLURM_PTY_PORT, but not the terminal.
    """
    return info.source.startswith("srun") and bool(env.get("SLURM_PTY_PORT")) and has_terminal()


def has_terminal() -> bool:
    """Return True if this process has a controlling terminal, even if stdin and stdout are redirected."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


class UnsupportedScheduler(NamedTuple):
    """Unsupported scheduler. launch recognizes its jobs and rejects them with a command to type instead.

    Attributes:
        variables: variables that are set only in its jobs. The first has the job's id.
        hostfile_commands: commands based on the scheduler's documentation.
    """

    name: str
    variables: tuple[str, ...]
    hostfile_commands: tuple[HostfileCommand, ...]


_UNSUPPORTED_SCHEDULERS = (
    # https://www.ibm.com/docs/en/tllm/5.1.0, "LoadLeveler variables for setting up the job environment".
    UnsupportedScheduler("LoadLeveler", ("LOADL_STEP_ID", "LOADL_PROCESSOR_LIST"),
                         (HostfileCommand("LOADL_PROCESSOR_LIST", "printf '%s\\n' $LOADL_PROCESSOR_LIST > hosts"),
                          )),
)


def _find_unsupported_job(env: Mapping[str, str]) -> tuple[UnsupportedScheduler, str] | None:
    """Return the unsupported scheduler whose job this is, and the variable that shows it."""
    return next(((scheduler, name) for scheduler in _UNSUPPORTED_SCHEDULERS for name in scheduler.variables
                 if env.get(name)), None)


def overridden_job_note(env: Mapping[str, str], why: str) -> tuple[str, ...]:
    """Return a note if a user's option, named in `why`, overrides the job of an unsupported scheduler."""
    match = _find_unsupported_job(env)
    return (f"ignoring {match[1]}={env[match[1]]} ({why})",) if match else ()


def reject_unsupported_job(env: Mapping[str, str]) -> None:
    """Raise an error in a job of an unsupported scheduler, instead of running one rank on this node.

    Raises:
        UserError: this is a job of one of `_UNSUPPORTED_SCHEDULERS`.
    """
    if match := _find_unsupported_job(env):
        scheduler, name = match
        job = f"{scheduler.name} job {env[name]}" if name == scheduler.variables[0] else job_of(scheduler.name)
        raise UserError(f"this is {job}, but launch does not support {scheduler.name} and cannot determine its"
                        " nodes",
                        where=f"{name}={env[name][:80]}",
                        instead=manual_instructions(scheduler.hostfile_commands, env))
