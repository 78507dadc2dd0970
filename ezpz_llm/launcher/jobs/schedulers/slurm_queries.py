"""Facts of a Slurm job that only squeue and scontrol report: its end time, devices, and CPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ezpz_llm.core.base import UserError, ask_command
from ezpz_llm.launcher.basics.hostlist import expand_hostlist, expand_numbers
from ezpz_llm.launcher.basics.hostnames import match_same_nodes
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Origin, Place, parse_local_time
from ezpz_llm.launcher.jobs.schedulers.slurm_tasks import PER_SOCKET, requested_tasks

STAMP = "%Y-%m-%dT%H:%M:%S"
"""Format of times in Slurm's output."""

_GPUS = re.compile(r"\bgpu:(?:[^:,()]+:)?([0-9]{1,6})(?=[(,]|$)")
_ORIGIN = Origin("scontrol show job", Place.JOB)


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
    return allocation._replace(ends_at=ends_at).with_notes(*notes)


def read_squeue(text: str, job_id: str) -> tuple[float | None, str]:
    """Return a job's end time in epoch seconds, or None, and its node list, from squeue's rows id|end|nodes.

    An array's last task has the id of the array, for which squeue lists all tasks.
    """
    for line in text.splitlines():
        fields = [word.strip() for word in line.split("|")]
        if len(fields) == 3 and fields[0] == job_id:
            return parse_local_time(fields[1], STAMP), fields[2]
    return None, ""


class JobDescription(NamedTuple):
    """Resources of a job as `scontrol show job -d` prints them; empty if it did not answer.

    Attributes:
        devices: accelerators that a step may use on each node. A job with exclusive nodes holds all accelerators
            of its nodes; if it also requests a number per node, steps get that number.
        cores: CPUs of the job on each node.
        tasks_per_node: tasks that Slurm derives for each node from the requested sockets, cores and threads; None
            if the job requests none of these.
        sockets: sockets of each node; empty unless a request depends on them.
    """

    devices: Mapping[str, int] = {}
    cores: Mapping[str, int] = {}
    tasks_per_node: int | None = None
    sockets: Mapping[str, int] = {}


def add_resources(allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
    """Add each node's devices and CPUs from scontrol, and the slots that depend on them.

    Variables have these only for some requests. A process in a step keeps the values of its step.
    """
    if allocation.step_id is not None:
        return allocation
    answer = ask_command(["scontrol", "show", "job", "-d", str(allocation.job_id)], env, limit_s, tries)
    job = read_job(answer.text or "")
    if env.get(PER_SOCKET):
        words = ["scontrol", "--oneliner", "show", "node", env.get(allocation.source, "")]
        job = job._replace(sockets=_read_sockets(ask_command(words, env, limit_s, tries).text or ""))
    names = {host.name for host in allocation.hosts}
    hosts, devices_from, cores_from = allocation.hosts, allocation.devices_from, allocation.cores_from
    if names <= job.devices.keys() and devices_from is None:
        hosts = tuple(host._replace(devices=job.devices[host.name]) for host in hosts)
        devices_from = _ORIGIN
        if len(set(job.devices.values())) > 1:
            allocation = allocation.with_notes("the job's nodes have unequal numbers of devices, so that each rank"
                                               " sees only its own: request --gpus-per-node instead of -G to see"
                                               " all")
    if names <= job.cores.keys() and cores_from is None:
        hosts = tuple(host._replace(cores=job.cores[host.name]) for host in hosts)
        cores_from = _ORIGIN
    found = allocation._replace(hosts=hosts, devices_from=devices_from, cores_from=cores_from)
    return _with_tasks(allocation, found, job, env)


def _with_tasks(before: Allocation, found: Allocation, job: JobDescription, env: Mapping[str, str]) -> Allocation:
    """Update the slots if they differ with what scontrol reported."""
    old = requested_tasks(env, [host.devices for host in before.hosts], before.source)
    sockets = [job.sockets[host.name] for host in found.hosts if host.name in job.sockets]
    new = requested_tasks(env, [host.devices for host in found.hosts], found.source, job.tasks_per_node, sockets)
    if old == new:
        return found
    hosts = tuple(host._replace(slots=count) for host, count in zip(found.hosts, new.counts, strict=True))
    notes = (*(note for note in found.notes if note not in old.notes), *new.notes)
    return found._replace(hosts=hosts, slots_from=new.origin, notes=notes)


def read_job(text: str) -> JobDescription:
    """Parse the output of `scontrol show job -d`.

    The rows of nodes look like "Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)", and requests like
    "TresPerNode=gres:gpu:2", or since Slurm 23 "gres/gpu:2".
    """
    devices: dict[str, int] = {}
    cores: dict[str, int] = {}
    per_node = re.search(r"^[ \t]+TresPerNode=(\S+)", text, re.MULTILINE)
    requested = sum(map(int, _GPUS.findall(per_node[1]))) if per_node else 0
    for row in re.finditer(r"^[ \t]+Nodes=(?P<hosts>\S+) CPU_IDs=(?P<cpus>\S*) Mem=\S* GRES=(?P<gres>\S*)", text,
                           re.MULTILINE):
        held = sum(map(int, _GPUS.findall(row["gres"])))
        names = _expand_or_empty(row["hosts"])
        devices |= dict.fromkeys(names, min(held, requested or held))
        cores |= dict.fromkeys(names, _count_cpus(row["cpus"]))
    return JobDescription(devices, cores if all(cores.values()) else {}, _read_tasks_per_node(text))


def _read_sockets(text: str) -> dict[str, int]:
    """Return the sockets of each node, from the output of `scontrol --oneliner show node`."""
    rows = re.finditer(r"^NodeName=(\S+) .*?\bSockets=(\d{1,4})\b", text, re.MULTILINE)
    return {row[1]: int(row[2]) for row in rows}


def _count_cpus(ids: str) -> int:
    try:
        return len(expand_numbers(ids))
    except ValueError:
        return 0


def _read_tasks_per_node(text: str) -> int | None:
    """Return the product of the requested sockets per node, cores per socket and threads per core."""
    sockets = re.search(r"\bSocks/Node=(\d{1,6})\b", text)
    others = re.search(r"\bReqB:S:C:T=\w+:\w+:(\d{1,6}|\*):(\d{1,6}|\*)", text)
    factors = [*(sockets.groups() if sockets else ()), *(others.groups() if others else ())]
    numbers = [int(factor) for factor in factors if factor != "*"]
    return prod(numbers) if numbers else None


def _expand_or_empty(hosts: str) -> list[str]:
    """Expand a node list that a Slurm command printed. Return [] if it is invalid."""
    try:
        return expand_hostlist(hosts)
    except UserError:
        return []
