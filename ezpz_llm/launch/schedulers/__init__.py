"""Which reservation are we in? One file a scheduler; this one holds the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.package_data import entry_points
from ezpz_llm.launch.hostlist import short_name
from ezpz_llm.launch.ranks import leftovers
from ezpz_llm.launch.schedulers import local, pbs, slurm
from ezpz_llm.launch.schedulers.scheduler import Allocation, ModuleScheduler, Scheduler

SCHEDULERS: tuple[Scheduler, ...] = tuple(map(ModuleScheduler, (slurm, pbs)))
"""In order of precedence, before those of other packages. Slurm first: it can come with a qsub of its own."""

ENTRY_POINTS = "ezpz_llm.schedulers"

QUICK, PATIENT = (1.0, 1), (5.0, 2)
"""Seconds for a try of a scheduler's command, and tries: for a plan that is only shown, and for one that runs."""


@cache
def schedulers() -> Mapping[str, Scheduler]:
    """All schedulers by name: ours, and those that installed packages name under `ENTRY_POINTS`."""
    found = {scheduler.NAME: scheduler for scheduler in SCHEDULERS}
    for scheduler in entry_points(ENTRY_POINTS):
        found.setdefault(scheduler.NAME, scheduler)
    return found


def step_launchers() -> tuple[str, ...]:
    """The programs by which schedulers start ranks themselves."""
    return tuple(own.program for one in schedulers().values() if (own := one.step_launcher()))


def scheduler_of(allocation: Allocation) -> Scheduler | None:
    """The scheduler whose job it is; None for one without a job."""
    return schedulers().get(allocation.scheduler)


def scheduler_here(env: Mapping[str, str]) -> Scheduler | None:
    """The first scheduler in a job of which this process is, whatever --scheduler says."""
    return next((one for one in schedulers().values() if env.get(one.JOB_VARIABLE)), None)


def find_allocation(env: Mapping[str, str], wanted: str = "auto", hosts_from: str | None = None) -> Allocation:
    """The reservation that `env` describes: of the scheduler `wanted` ("slurm", "pbs", "none"), or ("auto") of the
    one whose job this process is in. Only the environment and PBS's node file are read.

    Args:
        hosts_from: the option by which the user names hosts, so that those of a scheduler that is not spoken here
            need not be known.

    Raises:
        UserError: the variables of a scheduler contradict each other, two schedulers name different hosts, there
            is no job of the one wanted, or this is a job of one that is not spoken.
    """
    if left := leftovers(env):
        values = ", ".join(f"{name}={env[name]}" for name in left)
        rest = {name: value for name, value in env.items() if name not in left}
        note = f"{values}: no launcher has set it here, and ranks get their own"
        return find_allocation(rest, wanted, hosts_from).noting(note)
    if wanted != "auto":
        return _of(wanted, env)
    if found := local.detect_rank(env):
        return found
    in_jobs = [name for name, scheduler in schedulers().items() if env.get(scheduler.JOB_VARIABLE)]
    if len(in_jobs) > 1:
        return _settle(env)
    if in_jobs:
        return _of(in_jobs[0], env)
    if hosts_from is None:
        local.refuse(env)
        return local.detect(env)
    return local.detect(env).noting(*local.left_aside(env, hosts_from))


def supplement(allocation: Allocation, env: Mapping[str, str], effort: tuple[float, int]) -> Allocation:
    """`allocation` with what only the scheduler's own command knows (`ends_at`), within the seconds and tries of
    `effort`; with a note where it does not answer or says otherwise. Never an error."""
    scheduler = scheduler_of(allocation)
    return allocation if scheduler is None else scheduler.supplement(allocation, env, *effort)


def _of(wanted: str, env: Mapping[str, str]) -> Allocation:
    others = [f"{scheduler.JOB_VARIABLE}={env[scheduler.JOB_VARIABLE]}" for name, scheduler in schedulers().items()
              if name != wanted and env.get(scheduler.JOB_VARIABLE)]
    if rank := _rank_here(env):
        others.append(f"the rank variables of {rank}")
    notes = [f"{' and '.join(others)} left aside (--scheduler {wanted})"] if others else []
    if wanted == local.NAME:
        notes += local.left_aside(env, "--scheduler none")
        return replace(local.detect(env), source="--scheduler none").noting(*notes)
    found = schedulers()[wanted].detect(env)
    if found is None:
        raise UserError(f"--scheduler {wanted}, but {schedulers()[wanted].JOB_VARIABLE} is not set",
                        where="the environment", instead="start launch inside a job, or leave --scheduler out")
    return found.noting(*notes)


def _rank_here(env: Mapping[str, str]) -> str | None:
    try:
        found = local.detect_rank(env)
    except UserError as error:
        return f"a broken set ({error.found})"
    return found.source if found else None


def _settle(env: Mapping[str, str]) -> Allocation:
    """The one of several jobs that can be read, or the first if all have the same hosts."""
    within = [scheduler for scheduler in schedulers().values() if env.get(scheduler.JOB_VARIABLE)]
    all_of_them = " and ".join(f"{one.JOB_VARIABLE}={env[one.JOB_VARIABLE]}" for one in within)
    how = "both" if len(within) == 2 else "all"
    found: list[Allocation] = []
    errors: list[UserError] = []
    for scheduler in within:
        try:
            found += filter(None, [scheduler.detect(env)])
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    first, *others = found
    if errors:
        return first.noting(f"{all_of_them} are {how} set; {first.scheduler} counts, since {errors[0].found}")
    for other in others:
        ours, theirs = ({short_name(host.name) for host in one.hosts} for one in (first, other))
        if ours != theirs:
            choices = " or ".join(f"--scheduler {one.scheduler}" for one in (first, other))
            raise UserError(f"two reservations: {all_of_them}, with the hosts {_few(ours)} and {_few(theirs)}",
                            where=f"{first.source} and {other.source}",
                            instead=f"{choices}, or unset the other's variables")
    return first.noting(f"{all_of_them} are {how} set, with the same hosts: {first.scheduler} counts")


def _few(hosts: set[str]) -> str:
    return ", ".join(sorted(hosts)[:4]) + (", …" if len(hosts) > 4 else "")
