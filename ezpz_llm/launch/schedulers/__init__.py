"""Which reservation are we in? One file a scheduler; this one holds the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.allocation import Allocation, short_name
from ezpz_llm.launch.ranks import leftovers
from ezpz_llm.launch.schedulers import local, pbs, slurm, started

_WITH_JOBS = {slurm.NAME: slurm, pbs.NAME: pbs}
"""In order of precedence."""

QUICK, PATIENT = (1.0, 1), (5.0, 2)
"""Seconds for a try of a scheduler's command, and tries: for a plan that is only shown, and for one that runs."""


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
    if found := started.detect(env):
        return found
    in_jobs = [name for name, scheduler in _WITH_JOBS.items() if env.get(scheduler.JOB_VARIABLE)]
    if len(in_jobs) > 1:
        return _settle(env)
    if in_jobs:
        return _WITH_JOBS[in_jobs[0]].detect(env)
    if hosts_from is None:
        local.refuse(env)
        return local.detect(env)
    return local.detect(env).noting(*local.left_aside(env, hosts_from))


def supplement(allocation: Allocation, env: Mapping[str, str], effort: tuple[float, int]) -> Allocation:
    """`allocation` with what only the scheduler's own command knows (`ends_at`), within the seconds and tries of
    `effort`; with a note where it does not answer or says otherwise. Never an error."""
    scheduler = _WITH_JOBS.get(allocation.scheduler)
    return allocation if scheduler is None else scheduler.supplement(allocation, env, *effort)


def _of(wanted: str, env: Mapping[str, str]) -> Allocation:
    others = [f"{scheduler.JOB_VARIABLE}={env[scheduler.JOB_VARIABLE]}" for name, scheduler in _WITH_JOBS.items()
              if name != wanted and env.get(scheduler.JOB_VARIABLE)]
    if rank := _rank_here(env):
        others.append(f"the rank variables of {rank}")
    notes = [f"{' and '.join(others)} left aside (--scheduler {wanted})"] if others else []
    if wanted == local.NAME:
        notes += local.left_aside(env, "--scheduler none")
        return replace(local.detect(env), source="--scheduler none").noting(*notes)
    found = _WITH_JOBS[wanted].detect(env)
    if found is None:
        raise UserError(f"--scheduler {wanted}, but {_WITH_JOBS[wanted].JOB_VARIABLE} is not set",
                        where="the environment", instead="start launch inside a job, or leave --scheduler out")
    return found.noting(*notes)


def _rank_here(env: Mapping[str, str]) -> str | None:
    try:
        found = started.detect(env)
    except UserError as error:
        return f"a broken set ({error.found})"
    return found.source if found else None


def _settle(env: Mapping[str, str]) -> Allocation:
    """The one of two jobs that can be read, or either if both have the same hosts."""
    names = [scheduler.JOB_VARIABLE for scheduler in _WITH_JOBS.values()]
    both = " and ".join(f"{name}={env[name]}" for name in names)
    found: list[Allocation] = []
    errors: list[UserError] = []
    for scheduler in _WITH_JOBS.values():
        try:
            found.append(scheduler.detect(env))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    if errors:
        return found[0].noting(f"{both} are both set; {found[0].scheduler} counts, since {errors[0].found}")
    first, second = ({short_name(host.name) for host in one.hosts} for one in found)
    if first != second:
        raise UserError(f"two reservations: {both}, with the hosts {_few(first)} and {_few(second)}",
                        where=f"{found[0].source} and {found[1].source}",
                        instead="--scheduler slurm or --scheduler pbs, or unset the other's variables")
    return found[0].noting(f"{both} are both set, with the same hosts: {found[0].scheduler} counts")


def _few(hosts: set[str]) -> str:
    return ", ".join(sorted(hosts)[:4]) + (", …" if len(hosts) > 4 else "")
