"""Which rank this process is: one table of environment names with one order of precedence.

An MPI launcher's variables beat Slurm's, since under Hydra inside Slurm every rank inherits the variables of the
proxy that started it; torchrun's beat both, since its children inherit those of the one task that started it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ezpz_llm.errors import UserError


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
    """The variables of one launcher; each field lists names in the order in which they are tried."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    required: str | None = None


FAMILIES = (
    Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
           ("GROUP_RANK",)),
    Family("Cray PALS", ("PALS_RANKID",), ("PALS_SIZE", "PMI_SIZE"), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",),
           ("PALS_NODEID",)),
    Family("Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
           ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Family("MVAPICH", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
           ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Family("Hydra/PMI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
           ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    Family("PMIx", ("PMIX_RANK",), ("PMIX_SIZE",), ("PMIX_LOCAL_RANK",), ("PMIX_LOCAL_SIZE",)),
    Family("jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),
           ("JSM_NAMESPACE_LOCAL_SIZE",)),
    Family("Flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    Family("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",), (), ("SLURM_NODEID",),
           required="SLURM_STEP_ID"),
)


def find_rank(env: Mapping[str, str]) -> RankInfo:
    """Read this process's place from `env`; a process that nothing launched is rank 0 of 1.

    Raises:
        UserError: RANK without WORLD_SIZE or the other way round, or a value that cannot be.
    """
    told = [info for family in FAMILIES if (info := _read(family, env)) is not None]
    if not told:
        return RankInfo(0, 1, 0, 1, 0, "single process")
    chosen = told[0]
    notes = tuple(
        f"{other.source} says rank {other.rank} of {other.world_size}, "
        f"{chosen.source} says rank {chosen.rank} of {chosen.world_size}: the latter counts"
        for other in told[1:] if (other.rank, other.world_size) != (chosen.rank, chosen.world_size))
    return replace(chosen, notes=notes)


def _read(family: Family, env: Mapping[str, str]) -> RankInfo | None:
    if family.required is not None and family.required not in env:
        return None
    rank, size = _first(family.rank, env), _first(family.size, env)
    if family.name == "torchrun" and (rank is None) != (size is None):
        found, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise UserError(f"{found}={env[found]} is set, {missing} is not", where="environment",
                        instead=f"unset {found} (a leftover), or set both")
    if rank is None or size is None:
        return None
    where, world_size = _whole(rank, env), _whole(size, env)
    if not 0 <= where < world_size:
        raise UserError(f"{rank}={where} is not a rank of {size}={world_size}", where="environment")
    local_name = _first(family.local_rank, env)
    local_rank = _whole(local_name, env) if local_name else 0
    local_size = _local_size(family, env, world_size)
    if local_rank >= local_size:
        raise UserError(f"{local_name}={local_rank} is not one of {local_size} ranks on its host",
                        where="environment")
    node_name = _first(family.node_rank, env)
    node_rank = _whole(node_name, env) if node_name else (where - local_rank) // local_size
    return RankInfo(where, world_size, local_rank, local_size, node_rank, f"{family.name} ({rank})")


def _local_size(family: Family, env: Mapping[str, str], world_size: int) -> int:
    if name := _first(family.local_size, env):
        return _whole(name, env)
    if (family.name == "srun" or _first(family.local_rank, env) == "SLURM_LOCALID") and "SLURM_STEP_ID" in env:
        counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _whole("SLURM_NODEID", env) if "SLURM_NODEID" in env else 0
        if node < len(counts):
            return counts[node]
    return world_size if _first(family.local_rank, env) else 1


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x2),1" as [2, 2, 1]."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def _first(names: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _whole(name: str, env: Mapping[str, str]) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UserError(f"{name}={env[name]!r} is not a whole number", where="environment") from None
