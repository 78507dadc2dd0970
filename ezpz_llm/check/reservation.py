"""Checks of the reservation: scheduler, job, launcher, site; and `Check`, the result of any check."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.dialects import choose
from ezpz_llm.launch.schedulers import find_allocation, local
from ezpz_llm.launch.sites import find_site

# What one check says.
Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Check:
    """One line: what was found, whether a run can live with it, and what mends it (empty where all is well)."""

    level: Level
    name: str
    found: str
    instead: str = ""


_COMMANDS = {"Slurm": ("sbatch", "srun"), "PBS": ("qsub", "qstat")}


def checks(env: Mapping[str, str]) -> Iterator[Check]:
    """The lines about where ranks would run."""
    yield available(env)
    try:
        allocation = find_allocation(env)
    except UserError as error:
        yield Check("bad", "job", error.found, error.instead or "leave the job's shell and enter it again")
        return
    yield job(allocation.scheduler, allocation.job_id, len(allocation.hosts), allocation.ends_at)
    yield from (Check("warn", "job", note, "see launch --dry-run hostname") for note in allocation.notes)
    yield site(env)
    yield launcher(env, allocation.scheduler)


def available(env: Mapping[str, str]) -> Check:
    """Which scheduler's commands are here; that says nothing about being inside a job."""
    path = env.get("PATH", "")
    here = [f"{name} ({', '.join(found)})" for name, commands in _COMMANDS.items()
            if (found := [command for command in commands if shutil.which(command, path=path)])]
    return Check("ok", "scheduler", " and ".join(here) or "no Slurm or PBS commands on PATH")


def job(scheduler: str, job_id: str | None, hosts: int, ends_at: float | None) -> Check:
    """The reservation that this shell stands in."""
    if job_id is None:
        inside = "not inside a job: launch uses this host alone" if scheduler == local.NAME else scheduler
        return Check("ok", "job", inside)
    left = "" if ends_at is None else f", {max(0, ends_at - time.time()) / 60:.0f} min left"
    return Check("ok", "job", f"inside {scheduler} job {job_id}: {hosts} host(s){left}")


def site(env: Mapping[str, str]) -> Check:
    """The machine, as far as it is known."""
    try:
        found = find_site(None, env)
    except UserError as error:
        return Check("bad", "site", str(error.found), error.instead or f"mend {error.where}")
    return Check("ok", "site", f"{found.name} ({found.source})")


def launcher(env: Mapping[str, str], scheduler: str) -> Check:
    """What launch would start several ranks with."""
    try:
        found = choose("auto", scheduler, 2, env)
    except UserError as error:
        return Check("bad", "launcher", error.found, error.instead or "")
    return Check("ok", "launcher", f"{found.dialect} ({found.program}; {found.source})")
