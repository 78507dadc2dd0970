"""Rank of this process: one table of environment names with one order of precedence.

An MPI launcher's variables beat Slurm's, since under Hydra inside Slurm every rank inherits the variables of the
proxy that started it; torchrun's beat both, since its children inherit those of the one task that started it.
launch's shim repeats in torch's names what the launcher said. These come last: whatever disagrees with them was
started inside the rank. The launcher of another package brings names of its own, which launch hands to ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ezpz_llm.base import UserError, as_type, parse_json, shown
from ezpz_llm.launch.hostlist import expand_counts
from ezpz_llm.launch.variables import (
    RANK_NAMES_VARIABLE,
    RANK_SOURCE_VARIABLE,
    RANK_VARIABLE,
    RANKS_PER_NODE_VARIABLE,
    TORCHELASTIC_VARIABLE,
    TORCHS_OWN,
    WORLD_SIZE_VARIABLE,
)

ALONE = "single process"
"""The source of a process that nothing launched."""

_TO_MEET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankInfo:
    """Where a process stands in its job. `source` says which variables told, `notes` what disagreed with them."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The variables of one launcher. Of several names, the first that is set counts.

    `requires` are variables without which the others mean something else. `nodes` is the number of hosts.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str | None = None
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: str | None = None
    tasks_per_node: str | None = None
    requires: tuple[str, ...] = ()


# A batch script has SLURM_PROCID=0 too; only a step's tasks have a step's number.
_SRUN = Family("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID", (), ("SLURM_NODEID",),
               tasks_per_node="SLURM_STEP_TASKS_PER_NODE", requires=("SLURM_STEP_ID",))
# LOCAL_SIZE is what dist.setup tells DeepSpeed.
_TORCH = Family("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
                ("GROUP_RANK", "NODE_RANK"))

_OF_MPIS = (
    _TORCH,
    # PALS has no size of its own: PMI's where its PMI is Cray's, nothing under PMIx, where launch's has to do.
    Family("Cray PALS", "PALS_RANKID", ("PMI_SIZE", WORLD_SIZE_VARIABLE), "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",),
           ("PALS_NODEID",)),
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node.
    Family("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK",
           ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Family("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK",
           ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Family("Hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",),
           requires=("MPI_LOCALRANKID",)),
    replace(_SRUN, name="srun with PMI", rank="PMI_RANK", size=("PMI_SIZE",),
            requires=("SLURM_STEP_ID", "SLURM_LOCALID")),
    Family("PMI", "PMI_RANK", ("PMI_SIZE",), "PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    Family("PMIx", "PMIX_RANK", (WORLD_SIZE_VARIABLE,), "PMIX_LOCAL_RANK"),
)
_OF_STEPS = (
    Family("jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_LOCAL_RANK",
           ("JSM_NAMESPACE_LOCAL_SIZE",)),
    Family("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES"),
    _SRUN,
)
FAMILIES = (*_OF_MPIS, *_OF_STEPS)
"""In order of precedence. Those of other packages come between these two: an mpiexec inside their ranks counts."""


@dataclass(frozen=True)
class _Reading:
    """What one family says; None where it says nothing."""

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None


def names_for_ranks(families: Sequence[Family]) -> dict[str, str]:
    """What tells `find_rank` of the families that other packages bring; nothing where they bring none."""
    return {RANK_NAMES_VARIABLE: json.dumps([asdict(family) for family in families])} if families else {}


def _families(env: Mapping[str, str]) -> tuple[Family, ...]:
    text = env.get(RANK_NAMES_VARIABLE)
    if not text:
        return FAMILIES
    brought = as_type(tuple[Family, ...], parse_json(text, RANK_NAMES_VARIABLE), RANK_NAMES_VARIABLE)
    return (*_OF_MPIS, *brought, *_OF_STEPS)


def find_rank(env: Mapping[str, str]) -> RankInfo:
    """Read this process's place from `env`; a process that nothing launched is rank 0 of 1.

    What the family that counts leaves open (as torchrun's variables set by hand often do) is taken from others
    that agree with it on rank and size. A node's number that no variable gives is derived, which is right where
    all hosts run equally many ranks in blocks.

    Raises:
        UserError: a rank without a size or the other way round, or a value that cannot be.
    """
    _refuse_half(env)
    # By rank variable, since PMI_RANK means something else under each of three launchers: the first that fits.
    table = _families(env)
    told = {family.rank: family for family in reversed(table) if _is_told(family, env)}
    families = sorted(told.values(), key=table.index)
    if _is_the_shims(env):
        families.sort(key=lambda family: family is _TORCH)
    if not families:
        _refuse_rank_alone(env)
        return RankInfo(0, 1, 0, 1, 0, ALONE)
    chosen = _read(families[0], env)
    agreeing, notes = [chosen], []
    for family in families[1:]:
        try:
            other = _read(family, env)
        except UserError as error:
            notes.append(f"{error.found}; {chosen.source} counts")
            continue
        if (other.rank, other.world_size) == (chosen.rank, chosen.world_size):
            agreeing.append(other)
        else:
            notes.append(f"{other.source} says rank {other.rank} of {other.world_size}, {chosen.source} says rank "
                         f"{chosen.rank} of {chosen.world_size}: the latter counts")
    return _completed(agreeing, notes, _tasks_per_node(env.get(RANKS_PER_NODE_VARIABLE, "")))


def rank_variables(info: RankInfo) -> dict[str, str]:
    """A rank's place in the names that torch, DeepSpeed, accelerate and most scripts read."""
    return {"RANK": str(info.rank), "WORLD_SIZE": str(info.world_size), "LOCAL_RANK": str(info.local_rank),
            "LOCAL_WORLD_SIZE": str(info.local_size), "NODE_RANK": str(info.node_rank),
            RANK_VARIABLE: str(info.rank), RANK_SOURCE_VARIABLE: info.source}


def leftovers(env: Mapping[str, str]) -> tuple[str, ...]:
    """Torch's names for a rank's place that no launcher of this process has set, such as a RANK that was exported
    in this shell for another program. Whoever sets up a rank by hand sets all that ranks need to meet."""
    if TORCHELASTIC_VARIABLE in env or RANK_VARIABLE in env or is_by_hand(env):
        return ()
    return tuple(name for name in TORCHS_OWN if env.get(name))


def is_by_hand(env: Mapping[str, str]) -> bool:
    """Has something other than a launcher that we know made this process a rank, such as a training operator?"""
    return TORCHELASTIC_VARIABLE not in env and RANK_VARIABLE not in env and all(env.get(one) for one in _TO_MEET)


def _is_the_shims(env: Mapping[str, str]) -> bool:
    """Are torch's variables those of `rank_variables`, and not of a torchrun or a script inside the rank?"""
    return (bool(env.get(RANK_SOURCE_VARIABLE)) and env.get("RANK") == env.get(RANK_VARIABLE)
            and env.get("WORLD_SIZE") == env.get(WORLD_SIZE_VARIABLE)
            and (TORCHELASTIC_VARIABLE in env) == env[RANK_SOURCE_VARIABLE].startswith(_TORCH.name))


def _completed(agreeing: list[_Reading], notes: list[str], planned: list[int]) -> RankInfo:
    """The first reading, with what it leaves open taken from the others, from launch's plan, or derived."""
    rank, world_size, source = agreeing[0].rank, agreeing[0].world_size, agreeing[0].source
    local_rank = next((one.local_rank for one in agreeing if one.local_rank is not None), None)
    local_size = next((one.local_size for one in agreeing if one.local_size is not None), None)
    place = _planned_place(rank, world_size, planned)
    if local_rank is None and place is not None:
        local_rank, local_size = place[1:]
    if local_rank is None:
        if world_size > 1:
            notes.append(f"{source} gives no local rank: taken to be alone on its host")
        local_rank, local_size = 0, 1
    elif local_size is None:
        local_size = place[2] if place is not None and place[1] == local_rank else world_size
    if local_rank >= local_size:
        raise UserError(f"local rank {local_rank} is not one of {local_size} ranks on its host",
                        where=f"environment ({source})")
    node_rank = next((one.node_rank for one in agreeing if one.node_rank is not None
                      and one.local_rank in (None, local_rank)), None)
    if node_rank is None and place is not None and place[1:] == (local_rank, local_size):
        node_rank = place[0]
    if node_rank is None:
        node_rank = (rank - local_rank) // local_size
    return RankInfo(rank, world_size, local_rank, local_size, node_rank, source, tuple(notes))


def _planned_place(rank: int, world_size: int, planned: list[int]) -> tuple[int, int, int] | None:
    """Node rank, local rank and local size by launch's plan; None where the plan is of another world."""
    if sum(planned) != world_size:
        return None
    first = 0
    for node, count in enumerate(planned):
        if rank < first + count:
            return node, rank - first, count
        first += count
    return None


def _is_told(family: Family, env: Mapping[str, str]) -> bool:
    names = (family.rank, *family.requires)
    return all(env.get(name) for name in names) and _first(family.size, env) is not None


def _refuse_half(env: Mapping[str, str]) -> None:
    for found, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.get(found) and not env.get(missing):
            raise UserError(f"{found}={env[found]} is set, {missing} is not", where="environment",
                            instead=f"unset {found} (a leftover), or set both")


def _refuse_rank_alone(env: Mapping[str, str]) -> None:
    # Taking such a process for rank 0 of 1 would make as many rank 0s as there are ranks.
    for family in _families(env):
        if env.get(family.rank) and all(env.get(name) for name in family.requires):
            raise UserError(f"{family.rank}={env[family.rank]} is set, {' or '.join(family.size)} is not",
                            where=f"environment ({family.name})",
                            instead=f"start with launch, or unset {family.rank} if it is a leftover")


def _read(family: Family, env: Mapping[str, str]) -> _Reading:
    size = _first(family.size, env) or family.size[0]
    rank, world_size = _whole(family.rank, env), _whole(size, env)
    if not rank < world_size:
        raise UserError(f"{family.rank}={rank} is not a rank of {size}={world_size}", where="environment")
    node_rank = _optional(_first(family.node_rank, env), env)
    source = env[RANK_SOURCE_VARIABLE] if family is _TORCH and _is_the_shims(env) else (
        f"{family.name} ({family.rank})")
    return _Reading(source, rank, world_size, _optional(family.local_rank, env),
                    _local_size(family, env, world_size, node_rank), node_rank)


def _local_size(family: Family, env: Mapping[str, str], world_size: int, node_rank: int | None) -> int | None:
    if name := _first(family.local_size, env):
        return _whole(name, env)
    if family.tasks_per_node is not None:
        counts = _tasks_per_node(env.get(family.tasks_per_node, ""))
        return counts[node_rank] if node_rank is not None and node_rank < len(counts) else None
    nodes = _optional(family.nodes, env)
    return -(-world_size // nodes) if nodes else None


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x2),1" as [2, 2, 1]; nothing where it is no such list: other variables tell as much."""
    try:
        return expand_counts(text) if text else []
    except UserError:
        return []


def _first(names: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _optional(name: str | None, env: Mapping[str, str]) -> int | None:
    return _whole(name, env) if name and env.get(name) else None


def _whole(name: str, env: Mapping[str, str]) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", env[name].strip()):
        raise UserError(f"{name}={shown(env[name])} is not a whole number", where="environment")
    return int(env[name])
