"""Reservation that this process is in. One file a scheduler; this one has the order in which they are asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ezpz_llm.base import UserError, entry_points
from ezpz_llm.launch.addresses import is_among
from ezpz_llm.launch.hostnames import same_nodes
from ezpz_llm.launch.ranks import leftovers, names_for_ranks
from ezpz_llm.launch.schedulers import flux, local, lsf, pbs, slurm
from ezpz_llm.launch.schedulers.node_files import NODE_FILES
from ezpz_llm.launch.schedulers.scheduler import Allocation, ModuleScheduler, Scheduler, by_hand, job_of

SCHEDULERS: tuple[Scheduler, ...] = (*map(ModuleScheduler, (slurm, pbs, flux, lsf)), *NODE_FILES)
"""In order of precedence, before those of other packages. Slurm first: it can come with a qsub of its own."""

ENTRY_POINTS = "ezpz_llm.schedulers"

MEMBERS = tuple(name for name in (*Scheduler.__annotations__, *vars(Scheduler)) if not name.startswith("_"))
"""What a scheduler has."""

QUICK, PATIENT = (1.0, 1), (5.0, 2)
"""Seconds for a try of a scheduler's command, and tries: for a plan that is only shown, and for one that runs."""


@cache
def schedulers() -> Mapping[str, Scheduler]:
    """All schedulers by name: ours, and those that installed packages name under `ENTRY_POINTS`."""
    found = {scheduler.NAME: scheduler for scheduler in SCHEDULERS}

    def wrong(plugin: Any) -> str | None:
        if isinstance(plugin, type) or (missing := [name for name in MEMBERS if not hasattr(plugin, name)]):
            return "it is a class, not an object" if isinstance(plugin, type) else f"it has no {missing[0]}"
        if not isinstance(plugin.NAME, str) or not isinstance(plugin.TITLE, str):
            return "its NAME or its TITLE is not text"
        for _, pattern in plugin.PATTERNS:
            re.compile(pattern)
        if found.setdefault(plugin.NAME, plugin) is not plugin:
            return f"there is a scheduler {plugin.NAME} already"
        return None

    entry_points(ENTRY_POINTS, wrong)
    return found


def step_launchers() -> tuple[str, ...]:
    """The programs by which schedulers start ranks themselves."""
    return tuple(own.program for one in schedulers().values() if (own := one.step_launcher()))


def rank_names() -> dict[str, str]:
    """What tells ranks of the variables by which step launchers of other packages number them."""
    own = (one.step_launcher() for one in schedulers().values())
    return names_for_ranks([launcher.ranks for launcher in own if launcher and launcher.ranks])


def scheduler_of(allocation: Allocation) -> Scheduler | None:
    """The scheduler whose job it is; None for one without a job."""
    return schedulers().get(allocation.scheduler)


def scheduler_here(env: Mapping[str, str]) -> Scheduler | None:
    """The first scheduler in a job of which this process is, whatever --scheduler says."""
    return next((one for one in schedulers().values() if one.mark(env)), None)


def find_allocation(env: Mapping[str, str], wanted: str = "auto", hosts_from: str | None = None) -> Allocation:
    """The reservation that `env` describes: of the scheduler `wanted` ("slurm", "pbs", …, "none"), or ("auto") of
    the one whose job this process is in. Only the environment and node files are read; Flux, which has none, is
    asked.

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
        return find_allocation(rest, wanted, hosts_from).with_notes(note)
    if wanted != "auto":
        return _of(wanted, env)
    if found := local.detect_rank({**env, **rank_names()}):
        return found
    in_jobs = [name for name, scheduler in schedulers().items() if scheduler.mark(env)]
    if len(in_jobs) > 1:
        return _settle(env)
    if in_jobs:
        return _of_or_by_hand(in_jobs[0], env, hosts_from)
    if hosts_from is None:
        local.refuse(env)
        _refuse_traces(env)
        return local.detect(env)
    return local.detect(env).with_notes(*local.left_aside(env, hosts_from))


def supplement(allocation: Allocation, env: Mapping[str, str], effort: tuple[float, int]) -> Allocation:
    """`allocation` with what only the scheduler's own command knows (`ends_at`), within the seconds and tries of
    `effort`; with a note where it does not answer or says otherwise. Never an error."""
    scheduler = scheduler_of(allocation)
    return allocation if scheduler is None else scheduler.supplement(allocation, env, *effort)


def _of_or_by_hand(name: str, env: Mapping[str, str], hosts_from: str | None) -> Allocation:
    """The job's, or the user's own hosts where it cannot be read."""
    try:
        return _of(name, env)
    except UserError as error:
        if hosts_from is None:
            raise
        mark = schedulers()[name].mark(env) or ""
        return local.detect(env).with_notes(f"{mark}={env[mark]} left aside ({hosts_from}): {error.found}")


def _of(wanted: str, env: Mapping[str, str]) -> Allocation:
    others = [f"{mark}={env[mark]}" for name, scheduler in schedulers().items()
              if name != wanted and (mark := scheduler.mark(env))]
    if rank := _rank_here(env):
        others.append(f"the rank variables of {rank}")
    notes = [f"{' and '.join(others)} left aside (--scheduler {wanted})"] if others else []
    if wanted == local.NAME:
        notes += local.left_aside(env, "--scheduler none")
        return replace(local.detect(env), source="--scheduler none").with_notes(*notes)
    found = schedulers()[wanted].detect(env)
    if found is None:
        raise UserError(f"--scheduler {wanted}, but {schedulers()[wanted].JOB_VARIABLE} is not set",
                        where="the environment", instead="start launch inside a job, or leave --scheduler out")
    return found.with_notes(*notes)


def _rank_here(env: Mapping[str, str]) -> str | None:
    try:
        found = local.detect_rank({**env, **rank_names()})
    except UserError as error:
        return f"a broken set ({error.found})"
    return found.source if found else None


def _refuse_traces(env: Mapping[str, str]) -> None:
    """Never one rank on one host in silence, where a job's hosts are named but the job is not.

    Raises:
        UserError: a variable of a job's hosts is set.
    """
    for scheduler in schedulers().values():
        if name := next((name for name in scheduler.TRACES if env.get(name)), None):
            raise UserError(f"{name} is of {job_of(scheduler.TITLE)}, and {scheduler.JOB_VARIABLE} is not set:"
                            " either the job's variables were lost on the way here, or this one is a leftover",
                            where=f"{name}={env[name][:80]}", instead=by_hand(scheduler.HOSTS_LINES, env))


def _settle(env: Mapping[str, str]) -> Allocation:
    """The one of several jobs that can be read; of several of these the only one that has this node, or the first
    if all have the same hosts."""
    within = [scheduler for scheduler in schedulers().values() if scheduler.mark(env)]
    all_of_them = " and ".join(f"{mark}={env[mark]}" for one in within if (mark := one.mark(env)))
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
        return first.with_notes(f"{all_of_them} are {how} set; {first.scheduler} counts, since {errors[0].found}")
    here = [one for one in found if is_among(_names(one))]
    if len(here) == 1:
        return here[0].with_notes(f"{all_of_them} are {how} set; {here[0].scheduler} counts, since this node is in "
                                  "its job only")
    notes: list[str] = []
    for other in others:
        matches = same_nodes(_names(other), _names(first))
        if matches is None:
            choices = " or ".join(f"--scheduler {one.scheduler}" for one in (first, other))
            raise UserError(f"two reservations: {all_of_them}, with the hosts {_few(first)} and {_few(other)}",
                            where=f"{first.source} and {other.source}",
                            instead=f"{choices}, or unset the other's variables, or launch --hostfile hosts …")
        notes += matches.notes(other.source, first.source)
    return first.with_notes(f"{all_of_them} are {how} set, with the same hosts: {first.scheduler} counts", *notes)


def _names(allocation: Allocation) -> list[str]:
    return [host.name for host in allocation.hosts]


def _few(allocation: Allocation) -> str:
    names = sorted(_names(allocation))
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
