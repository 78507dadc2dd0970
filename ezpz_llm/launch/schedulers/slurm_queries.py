"""Facts of a Slurm job that only squeue and scontrol report: its end time and its devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ezpz_llm.base import UserError, ask_command
from ezpz_llm.launch.hostlist import expand_hostlist
from ezpz_llm.launch.hostnames import match_same_nodes
from ezpz_llm.launch.schedulers.scheduler import Allocation, parse_local_time
from ezpz_llm.launch.schedulers.slurm_tasks import requested_tasks

STAMP = "%Y-%m-%dT%H:%M:%S"
"""Format of times in Slurm's output."""

_GPUS = re.compile(r"\bgpu:(?:[^:,()]+:)?([0-9]{1,6})(?=[(,]|$)")


def add_end_time(allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
    """Add the job's end time from squeue: no variable has it before Slurm 23."""
    if allocation.ends_at is not None:
        return allocation
    # The user's SQUEUE_* variables could filter or sort the rows, and SLURM_TIME_FORMAT could omit the date.
    plain = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    answer = ask_command(["squeue", "--noheader", "--jobs", str(allocation.job_id), "--format", "%A|%e|%N"],
                         plain | {"SLURM_TIME_FORMAT": "standard"}, limit_s, tries)
    if answer.text is None:
        return allocation.with_notes(f"the job's end time is unknown: {answer.complaint}")
    ends_at, hosts = read_squeue(answer.text, str(allocation.job_id))
    notes = [] if ends_at is not None else ["the job's end time is unknown: squeue reports none"]
    if hosts and allocation.step_id is None:
        matches = match_same_nodes([host.name for host in allocation.hosts], _expand_or_empty(hosts))
        notes += matches.notes(allocation.source, "squeue") if matches else (
            f"{allocation.source} is {env.get(allocation.source)}, but squeue says {hosts}: using"
            f" {allocation.source}",)
    return replace(allocation, ends_at=ends_at).with_notes(*notes)


def read_squeue(text: str, job_id: str) -> tuple[float | None, str]:
    """Return a job's end time in epoch seconds, or None, and its node list, from squeue's rows id|end|nodes.

    An array's last task has the id of the array, for which squeue lists all tasks.
    """
    for line in text.splitlines():
        fields = [word.strip() for word in line.split("|")]
        if len(fields) == 3 and fields[0] == job_id:
            return parse_local_time(fields[1], STAMP), fields[2]
    return None, ""


def add_devices(allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
    """Add the job's devices from scontrol if they are not visible here, and the slots that depend on them."""
    return _with_tasks_per_gpu(allocation, _with_devices(allocation, env, limit_s, tries), env)


def _with_devices(allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
    # On a login node, salloc's shell does not see the job's devices, and `--gres=gpu:4` sets no variable.
    # SLURM_GPUS is the total of the job, which nodes need not share equally.
    if allocation.step_id is not None or (env.get("SLURMD_NODENAME") and not env.get("SLURM_GPUS")):
        return allocation
    answer = ask_command(["scontrol", "show", "job", "-d", str(allocation.job_id)], env, limit_s, tries)
    counts = read_devices(answer.text or "")
    if any(host.name not in counts for host in allocation.hosts) or not any(counts.values()):
        return allocation
    hosts = tuple(replace(host, devices=counts[host.name]) for host in allocation.hosts)
    if len({host.devices for host in hosts}) > 1:
        # Slurm 22.05: with 2 devices on the first node and 1 on the second, such a step saw 1 and 1.
        allocation = allocation.with_notes("the job's nodes have unequal numbers of devices, and an srun --overlap "
                                           "step may see fewer of them: request --gpus-per-node instead of -G")
    return replace(allocation, hosts=hosts, devices_source="scontrol show job")


def _with_tasks_per_gpu(before: Allocation, allocation: Allocation, env: Mapping[str, str]) -> Allocation:
    """Update the slots if scontrol reported devices that `before` lacks (for SLURM_NTASKS_PER_GPU)."""
    old, new = (requested_tasks(env, [host.devices for host in version.hosts], version.source)
                for version in (before, allocation))
    if allocation.step_id is not None or old == new:
        return allocation
    hosts = tuple(replace(host, slots=count) for host, count in zip(allocation.hosts, new.counts, strict=True))
    notes = (*(note for note in allocation.notes if note not in old.notes), *new.notes)
    return replace(allocation, hosts=hosts, slots_source=new.source, notes=notes)


def read_devices(text: str) -> dict[str, int]:
    """Return the job's accelerators on each node, from the output of `scontrol show job -d`.

    Its rows look like "Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)".
    """
    devices: dict[str, int] = {}
    for row in re.finditer(r"^[ \t]+Nodes=(?P<hosts>\S+) CPU_IDs=\S* Mem=\S* GRES=(?P<gres>\S*)", text,
                           re.MULTILINE):
        count = sum(map(int, _GPUS.findall(row["gres"])))
        devices |= dict.fromkeys(_expand_or_empty(row["hosts"]), count)
    return devices


def _expand_or_empty(hosts: str) -> list[str]:
    """Expand a node list that a Slurm command printed. Return [] if it is invalid."""
    try:
        return expand_hostlist(hosts)
    except UserError:
        return []
