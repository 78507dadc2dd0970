"""Slurm: the job's variables, or the step's where we are inside one; never a mixture of the two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import Allocation, Host

NAME = "slurm"

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEAT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


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


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm host list such as `nid[001-004,007],gpu[01-02]`, in its order, repeats kept.

    Raises:
        UserError: quoting `text`, where it is not a host list.
    """
    text = text.strip()
    if text in ("", "(null)"):
        return []
    words = re.findall(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+|[\[\]]", text)
    return [host for word in words for host in _expand_word(word, text)]


def _expand_word(word: str, text: str) -> list[str]:
    names = [""]
    for literal, bracket in re.findall(r"([^\[\]]+)|(\[[^\[\]]*\]?|\])", word):
        parts = [literal] if literal else _expand_bracket(bracket, text)
        names = [name + part for name in names for part in parts]
    return names


def _expand_bracket(bracket: str, text: str) -> list[str]:
    if not (bracket.startswith("[") and bracket.endswith("]")):
        raise _not_a_list(text)
    parts = []
    for item in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_a_list(text)
        parts += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return parts


def _not_a_list(text: str) -> UserError:
    return UserError(f"not a Slurm host list: {text!r}", instead="a list such as nid[001-004,007],gpu01")


def expand_counts(text: str) -> list[int]:
    """`2(x2),1` as [2, 2, 1]: Slurm's compact form of one number a node.

    Raises:
        UserError: quoting `text`, where it is not of that form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _REPEAT.fullmatch(item.strip())
        if match is None:
            raise UserError(f"not Slurm's numbers per node: {text!r}", instead="numbers such as 2(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
