"""Detection of the job that this process runs in. Each scheduler is a class in a module of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from ezpz_llm.core.base import UserError, entry_points
from ezpz_llm.launcher.basics.addresses import is_local_node_among
from ezpz_llm.launcher.basics.hostnames import match_same_nodes
from ezpz_llm.launcher.basics.ranks import leftover_variables, names_for_ranks
from ezpz_llm.launcher.jobs.schedulers import local
from ezpz_llm.launcher.jobs.schedulers.flux import FluxScheduler
from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler
from ezpz_llm.launcher.jobs.schedulers.node_files import NODE_FILES
from ezpz_llm.launcher.jobs.schedulers.pbs import PbsScheduler
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    BatchScheduler,
    Scheduler,
    StepLauncher,
    job_of,
    manual_instructions,
)
from ezpz_llm.launcher.jobs.schedulers.slurm import SlurmScheduler

SCHEDULERS: tuple[Scheduler, ...] = (SlurmScheduler(), PbsScheduler(), FluxScheduler(), LsfScheduler(), *NODE_FILES)
"""Built-in schedulers in order of precedence, ahead of plugins. Slurm is first because it may ship its own qsub."""

ENTRY_POINTS = "ezpz_llm.schedulers"

QUICK, PATIENT = (1.0, 1), (5.0, 2)
"""(timeout in seconds, number of tries) of a scheduler's command: QUICK for --dry-run, PATIENT for a run."""


@cache
def schedulers() -> Mapping[str, Scheduler]:
    """Return all schedulers by name: the built-in ones, and plugins registered under `ENTRY_POINTS`."""
    by_name = {scheduler.NAME: scheduler for scheduler in SCHEDULERS}

    def find_problem(plugin: Any) -> str | None:
        """Add a plugin to the schedulers, or return the reason why it cannot be used."""
        if not isinstance(plugin, Scheduler):
            kind = "a class" if isinstance(plugin, type) else f"of type {type(plugin).__name__}"
            return f"it is {kind}, not an instance of a class derived from {Scheduler.__module__}.Scheduler"
        for name in ("NAME", "TITLE", "JOB_VARIABLE"):
            if not isinstance(getattr(plugin, name, None), str):
                return f"its {name} is not a string"
        if not isinstance(launcher := plugin.step_launcher(), StepLauncher | None):
            return f"its step_launcher() returns a {type(launcher).__name__}, not a StepLauncher"
        for _, pattern in plugin.PATTERNS:
            re.compile(pattern)
        if by_name.setdefault(plugin.NAME, plugin) is not plugin:
            return f"a scheduler named {plugin.NAME} already exists"
        return None

    entry_points(ENTRY_POINTS, find_problem)
    return by_name


def batch_schedulers() -> Mapping[str, BatchScheduler]:
    """Return the schedulers for which submit writes job scripts, by name."""
    return {name: scheduler for name, scheduler in schedulers().items() if isinstance(scheduler, BatchScheduler)}


def step_launchers() -> tuple[str, ...]:
    """Return the programs with which schedulers start ranks, such as srun."""
    return tuple(launcher.program for scheduler in schedulers().values() if (launcher := scheduler.step_launcher()))


def rank_names() -> dict[str, str]:
    """Return the setting that tells ranks which variables hold the rank numbers of plug-in step launchers."""
    launchers = (scheduler.step_launcher() for scheduler in schedulers().values())
    return names_for_ranks([launcher.ranks for launcher in launchers if launcher and launcher.ranks])


def scheduler_of(allocation: Allocation) -> Scheduler | None:
    """Return the scheduler of the allocation's job, or None if there is no job."""
    return schedulers().get(allocation.scheduler)


def is_set_by_scheduler(name: str, env: Mapping[str, str]) -> bool:
    """Return True if a scheduler, not the user, set this variable. Its value then holds only on this node."""
    return any(scheduler.sets_variable(name, env) for scheduler in schedulers().values())


def scheduler_here(env: Mapping[str, str]) -> Scheduler | None:
    """Return the first scheduler whose job variables are in `env`, regardless of --scheduler."""
    return next((scheduler for scheduler in schedulers().values() if scheduler.mark(env)), None)


def find_allocation(env: Mapping[str, str], wanted: str = "auto", hosts_from: str | None = None) -> Allocation:
    """Return the allocation that `env` describes.

    Reads only the environment and node files, except under Flux, whose broker is queried.

    Args:
        wanted: a scheduler's name, "none", or "auto" for the scheduler whose job this process is in.
        hosts_from: the option with which the user names nodes; launch then does not need the nodes of the job.

    Raises:
        UserError: the variables of a scheduler contradict each other, two schedulers name different nodes, there
            is no job of the scheduler `wanted`, or the job's scheduler is unsupported.
    """
    if stale := leftover_variables(env):
        values = ", ".join(f"{name}={env[name]}" for name in stale)
        cleaned_env = {name: value for name, value in env.items() if name not in stale}
        note = f"ignoring {values}: it was not set by a launcher, and each rank gets its own value"
        return find_allocation(cleaned_env, wanted, hosts_from).with_notes(note)
    if wanted != "auto":
        return _allocation_of(wanted, env)
    if rank_allocation := local.detect_rank({**env, **rank_names()}):
        return rank_allocation
    in_jobs = [name for name, scheduler in schedulers().items() if scheduler.mark(env)]
    if len(in_jobs) > 1:
        return _choose_among_jobs(env)
    if in_jobs:
        return _allocation_or_local(in_jobs[0], env, hosts_from)
    if hosts_from is None:
        local.reject_unsupported_job(env)
        _reject_traces(env)
        return local.detect(env)
    return local.detect(env).with_notes(*local.overridden_job_note(env, hosts_from))


def supplement(allocation: Allocation, env: Mapping[str, str],
               query_limits: tuple[float, int]) -> Allocation:
    """Add facts that only the scheduler's commands report, such as the job's end time.

    `query_limits` is (timeout in seconds, number of attempts).
    Adds a note if a command fails or contradicts the allocation; never raises.
    """
    scheduler = scheduler_of(allocation)
    return allocation if scheduler is None else scheduler.supplement(allocation, env, *query_limits)


def _allocation_or_local(name: str, env: Mapping[str, str], hosts_from: str | None) -> Allocation:
    """Return the job's allocation, or this node if the allocation cannot be read and the user names nodes."""
    try:
        return _allocation_of(name, env)
    except UserError as error:
        if hosts_from is None:
            raise
        mark = schedulers()[name].mark(env) or ""
        return local.detect(env).with_notes(f"ignoring {mark}={env[mark]} ({hosts_from}): {error.found}")


def _allocation_of(scheduler_name: str, env: Mapping[str, str]) -> Allocation:
    ignored = [f"{mark}={env[mark]}" for name, scheduler in schedulers().items()
               if name != scheduler_name and (mark := scheduler.mark(env))]
    if rank_source := _rank_source(env):
        ignored.append(f"the rank variables of {rank_source}")
    notes = [f"ignoring {' and '.join(ignored)} (--scheduler {scheduler_name})"] if ignored else []
    if scheduler_name == local.NAME:
        notes += local.overridden_job_note(env, "--scheduler none")
        return local.detect(env)._replace(source="--scheduler none").with_notes(*notes)
    allocation = schedulers()[scheduler_name].detect(env)
    if allocation is None:
        variable = schedulers()[scheduler_name].JOB_VARIABLE
        raise UserError(f"--scheduler {scheduler_name} was given, but {variable} is not set",
                        where="the environment", instead="start launch inside a job, or omit --scheduler")
    return allocation.with_notes(*notes)


def _rank_source(env: Mapping[str, str]) -> str | None:
    try:
        allocation = local.detect_rank({**env, **rank_names()})
    except UserError as error:
        return f"an inconsistent set ({error.found})"
    return allocation.source if allocation else None


def _reject_traces(env: Mapping[str, str]) -> None:
    """Raise if a job's nodes are set but its id is not, instead of running one rank on this node.

    Raises:
        UserError: one of a scheduler's TRACES is set.
    """
    for scheduler in schedulers().values():
        if name := next((name for name in scheduler.TRACES if env.get(name)), None):
            raise UserError(f"{name} belongs to {job_of(scheduler.TITLE)}, but {scheduler.JOB_VARIABLE} is not set:"
                            f" either the job's other variables did not reach this process, or {name} is stale",
                            where=f"{name}={env[name][:80]}",
                            instead=manual_instructions(scheduler.HOSTFILE_COMMANDS, env))


def _choose_among_jobs(env: Mapping[str, str]) -> Allocation:
    """Return the allocation to use if `env` has the variables of several schedulers.

    Prefers jobs that can be read, then the only job with this node, then the first if all have the same nodes.
    """
    candidates = [scheduler for scheduler in schedulers().values() if scheduler.mark(env)]
    all_marks = " and ".join(f"{mark}={env[mark]}" for scheduler in candidates if (mark := scheduler.mark(env)))
    how = "both" if len(candidates) == 2 else "all"
    readable: list[Allocation] = []
    errors: list[UserError] = []
    for scheduler in candidates:
        try:
            readable += filter(None, [scheduler.detect(env)])
        except UserError as error:
            errors.append(error)
    if not readable:
        raise errors[0]
    first, *other_allocations = readable
    if errors:
        return first.with_notes(f"{all_marks} are {how} set; using {first.scheduler}: {errors[0].found}")
    local_allocations = [allocation for allocation in readable if is_local_node_among(_names(allocation))]
    if len(local_allocations) == 1:
        allocation = local_allocations[0]
        return allocation.with_notes(f"{all_marks} are {how} set; using {allocation.scheduler}: only its job has"
                                     " this node")
    notes: list[str] = []
    for other in other_allocations:
        matches = match_same_nodes(_names(other), _names(first))
        if matches is None:
            choices = " or ".join(f"--scheduler {allocation.scheduler}" for allocation in (first, other))
            raise UserError(f"{all_marks} are {how} set, with different nodes: {_first_names(first)} and"
                            f" {_first_names(other)}", where=f"{first.source} and {other.source}",
                            instead=f"{choices}, or unset the other's variables, or launch --hostfile hosts …")
        notes += matches.notes(other.source, first.source)
    return first.with_notes(f"{all_marks} are {how} set, with the same nodes: using {first.scheduler}", *notes)


def _names(allocation: Allocation) -> list[str]:
    return [host.name for host in allocation.hosts]


def _first_names(allocation: Allocation) -> str:
    names = sorted(_names(allocation))
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
