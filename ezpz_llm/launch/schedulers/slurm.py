"""Slurm: the job's variables, or the step's where we are inside one; never a mixture of the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import Allocation, Host
from ezpz_llm.launch.hostlist import expand_counts, expand_hosts

NAME = "slurm"


@dataclass(frozen=True)
class _Names:
    """Where a job and a step each say their hosts and tasks."""

    hosts: str
    tasks: str
    tasks_per_node: str


_JOB = _Names("SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
_STEP = _Names("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


def detect(env: Mapping[str, str]) -> Allocation | None:
    """The job (batch script, salloc shell) or the step (an interactive `srun --pty`) that we are in.

    Raises:
        UserError: the host list or the tasks per node cannot be read.
    """
    job_id = env.get("SLURM_JOB_ID")
    if not job_id:
        return None
    names = _STEP if env.get("SLURM_STEP_ID") else _JOB
    hosts = expand_hosts(env.get(names.hosts, ""))
    if not hosts:
        raise UserError(f"Slurm job {job_id} names no host", where=names.hosts,
                        instead="start launch inside sbatch, salloc or srun")
    ends_at = env.get("SLURM_JOB_END_TIME")
    return Allocation(
        scheduler=NAME,
        job_id=job_id,
        hosts=tuple(Host(name, slots) for name, slots in zip(hosts, _slots(env, names, len(hosts)), strict=True)),
        ends_at=float(ends_at) if ends_at and ends_at.isdigit() else None,
        source=names.hosts,
        cores_per_host=min(expand_counts(env["SLURM_JOB_CPUS_PER_NODE"]), default=None)
        if env.get("SLURM_JOB_CPUS_PER_NODE") else None,
    )


def _slots(env: Mapping[str, str], names: _Names, hosts: int) -> list[int | None]:
    # Slurm writes tasks per node even where nobody asked for tasks; only then is SLURM_NTASKS missing. A step of
    # a single task is what an interactive shell is given, and no wish either.
    tasks, per_node = env.get(names.tasks), env.get(names.tasks_per_node)
    if not tasks or not per_node or (names is _STEP and tasks == "1"):
        return [None] * hosts
    counts = expand_counts(per_node)
    if len(counts) != hosts:
        raise UserError(f"tasks for {len(counts)} nodes, but {hosts} hosts",
                        where=f"{names.tasks_per_node}={per_node}, {names.hosts}={env.get(names.hosts)}",
                        instead="give -n or --ppn and --hostfile")
    return list(counts)
