"""Tasks per node that a Slurm job requests, from the first of its variables that has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_llm.core.base import UserError, count_noun, whole_number
from ezpz_llm.launcher.basics.hostlist import expand_counts
from ezpz_llm.launcher.jobs.schedulers.scheduler import Origin, Place

_TOTALS = ("SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE, _PER_GPU, _LAYOUT = "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_TASKS_PER_NODE"
PER_SOCKET = "SLURM_NTASKS_PER_SOCKET"
_PER_TASK, _TRES_PER_TASK = "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"


class Tasks(NamedTuple):
    """Requested tasks of each node, None if the job requests none; `source` names the variables."""

    counts: tuple[int | None, ...]
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> Origin | None:
        """Origin of the counts; None if the node list has the same."""
        return Origin(self.source, Place.JOB) if self.source else None


def requested_tasks(env: Mapping[str, str], gpus: Sequence[int | None], hosts_source: str,
                    implied: int | None = None, sockets: Sequence[int] = ()) -> Tasks:
    """Return the tasks per node that the job requests.

    Precedence: the total (SLURM_NTASKS, SLURM_NPROCS) as SLURM_TASKS_PER_NODE lays it out, else evenly;
    SLURM_NTASKS_PER_NODE; SLURM_NTASKS_PER_GPU; SLURM_NTASKS_PER_SOCKET; SLURM_TASKS_PER_NODE.

    A job that requests sockets, cores or threads, as with --hint=nomultithread, but no tasks, has a total of
    `implied` tasks per node: sbatch and salloc derive it ("Number of tasks implicitly set", src/sbatch/opt.c). It
    is not used.

    Args:
        gpus: devices of each node; None if unknown.
        hosts_source: source of the node list, for messages.
        implied: product of the requested sockets, cores and threads; by default that of `_implied_tasks`.
        sockets: sockets of each node; empty if unknown.

    Raises:
        UserError: a value is not a number of tasks, or is for another number of nodes.
    """
    nodes = len(gpus)
    total = next((name for name in _TOTALS if env.get(name)), None)
    layout = env.get(_LAYOUT)
    notes: tuple[str, ...] = ()
    implied = implied or _implied_tasks(env)
    is_implied = total and implied and not env.get(_PER_NODE) and _number(env, total) == implied * nodes
    if is_implied and (implied != 1 or any(gpus)):
        notes = (f"{total}={env[str(total)]} is ignored, because Slurm derives it from the requested cores or"
                 " threads (--ppn sets ranks)",)
    if total and layout and not is_implied:
        # These are Slurm's usual variables, so the plan does not name them.
        source = "" if total == _TOTALS[0] else f"{total}={env[total]} and {_LAYOUT}={layout}"
        return Tasks(expand_layout(layout, nodes, f"{_LAYOUT}={layout}, {hosts_source}"), source)
    if total and not is_implied:
        share, remainder = divmod(_number(env, total), nodes)
        return Tasks(tuple(share + (node < remainder) for node in range(nodes)),
                     f"{total}={env[total]}, spread evenly")
    if env.get(_PER_NODE):
        return Tasks((_number(env, _PER_NODE),) * nodes, f"{_PER_NODE}={env[_PER_NODE]}")
    if env.get(_PER_GPU):
        return _per_gpu(env, gpus)
    if env.get(PER_SOCKET):
        return _per_socket(env, nodes, sockets)
    if is_implied or not layout or set(expand_counts(layout)) == {1}:
        # Slurm writes 1 for each node of a job that requests no tasks.
        return Tasks((None,) * nodes, notes=notes)
    if _matches_cpus(layout, env):
        has_devices = any(gpus) or env.get("SLURM_GPUS")
        note = f"{_LAYOUT}={layout} only counts CPUs, as SLURM_NTASKS is not set: it is ignored (--ppn sets ranks)"
        return Tasks((None,) * nodes, notes=() if has_devices else (note,))
    return Tasks(expand_layout(layout, nodes, f"{_LAYOUT}={layout}, {hosts_source}"), f"{_LAYOUT}={layout}")


def _per_gpu(env: Mapping[str, str], gpus: Sequence[int | None]) -> Tasks:
    nodes = len(gpus)
    per_gpu, source = _number(env, _PER_GPU), f"{_PER_GPU}={env[_PER_GPU]}"
    counts = [count for count in gpus if count]
    if len(counts) < nodes and (total := count_devices(env.get("SLURM_GPUS", ""))) and total % nodes == 0:
        counts = [total // nodes] * nodes
    if len(counts) < nodes and (on_node := whole_number(env.get("SLURM_GPUS_ON_NODE", ""))):
        counts = [on_node] * nodes
    if len(counts) < nodes:
        return Tasks((None,) * nodes, notes=(f"{source} is ignored: the job's GPUs per node are unknown (--ppn sets"
                                             " ranks)",))
    devices = f"{count_noun(counts[0], 'GPU')} per node" if len(set(counts)) == 1 else "each node's GPUs"
    return Tasks(tuple(per_gpu * count for count in counts), f"{source}, {devices}")


def _per_socket(env: Mapping[str, str], nodes: int, sockets: Sequence[int]) -> Tasks:
    per_socket, source = _number(env, PER_SOCKET), f"{PER_SOCKET}={env[PER_SOCKET]}"
    if len(sockets) < nodes:
        return Tasks((None,) * nodes, notes=(f"{source} is ignored: the nodes' sockets are unknown (--ppn sets"
                                             " ranks)",))
    number = count_noun(sockets[0], "socket") + " per node" if len(set(sockets)) == 1 else "each node's sockets"
    return Tasks(tuple(per_socket * count for count in sockets), f"{source}, {number}")


def _implied_tasks(env: Mapping[str, str]) -> int | None:
    """Return the tasks per node that Slurm derives from --threads-per-core or --hint; None without these."""
    return whole_number(env.get("SLURM_THREADS_PER_CORE", "")) or None


def devices_per_task(env: Mapping[str, str]) -> int | None:
    """Return the job's --gpus-per-task, or None. Slurm 24.11 and newer set only SLURM_TRES_PER_TASK."""
    if text := env.get(_PER_TASK):
        return count_devices(text) or None
    requests = env.get(_TRES_PER_TASK, "").split(",")
    counts = [whole_number(re.split("[=:]", text)[-1]) for text in requests if text.startswith("gres/gpu")]
    return sum(filter(None, counts)) or None


def count_devices(text: str) -> int | None:
    """Return the devices in "4", "a100:4" or "a100:2,v100:2"; None for other text."""
    numbers = [whole_number(word.rpartition(":")[2]) for word in text.split(",")]
    return None if None in numbers else sum(filter(None, numbers))


def expand_layout(layout: str, nodes: int, where: str) -> tuple[int, ...]:
    """Return the counts in a layout such as "2(x2),1".

    Raises:
        UserError: invalid, or for another number of nodes.
    """
    counts = expand_counts(layout)
    if len(counts) != nodes:
        raise UserError(f"the task layout has {len(counts)} nodes, but the node list has {nodes}", where=where,
                        instead="pass --hostfile, and -n or --ppn")
    return tuple(counts)


def _matches_cpus(layout: str, env: Mapping[str, str]) -> bool:
    """Return True if `layout` only restates the nodes' CPUs, as Slurm does for a job that requests no tasks."""
    cpus = env.get("SLURM_JOB_CPUS_PER_NODE")
    per_task = whole_number(env.get("SLURM_CPUS_PER_TASK", "")) or 1
    return bool(cpus) and [count // per_task for count in expand_counts(cpus or "")] == expand_counts(layout)


def _number(env: Mapping[str, str], name: str) -> int:
    number = whole_number(env[name])
    if not number:
        raise UserError(f"{name}={env[name]!r} is not a number of tasks", where="environment",
                        instead=f"unset {name}, and pass -n or --ppn to launch")
    return number
