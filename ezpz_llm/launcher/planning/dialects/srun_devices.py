"""Devices of Slurm steps, which srun does not give to a step unless the job or the step requests them.

srun(1), --gres: a job holds all devices of exclusive nodes, but its steps get only those that it requested. So
launch states the planned devices for each step: of srun's ranks, and of the daemons of mpiexec and torchrun. Each
case was run on Slurm 22.05.8 and 26.05.3.
"""

from __future__ import annotations

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.jobs.schedulers.slurm_tasks import count_devices
from ezpz_llm.launcher.planning.dialects.work import Work

_REASON = "the daemons' own srun must not wait for the step that launch may run in, and needs its devices"
_REQUEST = "SLURM_GPUS_PER_NODE"


def rank_devices(work: Work) -> tuple[str, ...]:
    """Return the options with which srun gives ranks the planned devices; empty if Slurm does not manage devices.

    Ranks see all devices of their node, except in a job with --gpus-per-task, and on nodes with unequal numbers of
    devices, for which srun has no other option: there a rank sees only its own.
    """
    counts = [count for count in work.devices if count is not None]
    if len(counts) < len(work.hosts) or any("--gpu" in word or "--gres" in word for word in work.site_options):
        return (f"--gpus-per-task={work.devices_per_rank}",) if not counts and work.devices_per_rank else ()
    if work.devices_per_rank:
        return (*_per_node(counts, work), f"--gpus-per-task={work.devices_per_rank}")
    ranks = [number for _, number in work.placement.ranks]
    if len(set(counts)) > 1 and all(number <= count for number, count in zip(ranks, counts, strict=True)):
        return ("--gpus-per-task=1",)
    return _per_node(counts, work)


def daemon_options(work: Work) -> tuple[str, str]:
    """Return the options of the srun with which mpiexec starts its daemons, and the reason.

    Each daemon gets the devices of the ranks of its node.

    Raises:
        UserError: nodes have unequal numbers of devices, and ranks need more than those of the smallest node.
    """
    counts = [count for count in work.devices if count is not None]
    if len(counts) < len(work.hosts):
        counts = []
    if len(set(counts)) > 1 and min(counts) < work.placement.most:
        raise UserError(f"srun cannot give the nodes {counts[:8]} devices, but only equal numbers",
                        where="the Slurm job",
                        instead="--launcher srun, or a job with --gpus-per-node instead of -G")
    devices = _per_node(counts, work) if counts else ()
    return " ".join(("--overlap", "--export=ALL", *devices)), _REASON


def _per_node(counts: list[int], work: Work) -> tuple[str, ...]:
    number, request = min(counts), work.env.get(_REQUEST, "")
    # In a job with -G, which srun applies to its steps, the total must match. The request may also have types
    # ("a100:4").
    total = (f"--gpus={number * len(work.hosts)}",) if work.env.get("SLURM_GPUS") else ()
    return (*total, f"--gpus-per-node={request if count_devices(request) == number else number}")
