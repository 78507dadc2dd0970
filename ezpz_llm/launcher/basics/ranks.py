"""Rank of this process, read from the launchers' environment variables, in a fixed order of precedence.

Variables of an MPI launcher take precedence over Slurm's: under Hydra inside Slurm, every rank inherits the Slurm
variables of its proxy. Variables of torchrun take precedence over both: its children inherit those of the task that
started torchrun. If launch's shim set torch's variables from the launcher's, torch's variables come last, because a
process whose launcher variables differ from them was started inside the rank. launch passes the variable names of
plug-in launchers to the ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_llm.core.base import UserError, as_type, parse_json, shorten_value
from ezpz_llm.launcher.basics.hostlist import expand_counts
from ezpz_llm.launcher.basics.variables import (
    LOCAL_RANK_VARIABLE,
    RANK_NAMES_VARIABLE,
    RANK_SOURCE_VARIABLE,
    RANK_VARIABLE,
    RANKS_PER_NODE_VARIABLE,
    TORCHELASTIC_VARIABLE,
    TORCHS_OWN,
    WORLD_SIZE_VARIABLE,
)

ALONE = "single process"
"""Source of the rank of a process that no launcher started."""

_RENDEZVOUS_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


OUTER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "PALS_RANKID", "PALS_LOCAL_", "PALS_NODEID",
                   "SLURM_PROCID", "SLURM_LOCALID", "FLUX_TASK_", "JSM_NAMESPACE_")
"""Prefixes of rank variables of srun and mpiexec, which are removed if one of them starts torchrun on each node.

The ranks of torchrun would inherit them, and MPI would identify all ranks of a node as the same rank.
"""


class RankInfo(NamedTuple):
    """Rank of a process in its job; `source` names the variables used, `notes` report variables that disagree."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    source: str
    notes: tuple[str, ...] = ()


class Family(NamedTuple):
    """Rank variables of one launcher. In a tuple of names, the first that is set is used.

    Attributes:
        nodes: variable with the number of nodes.
        requires: variables that must be set too, and not be negative; otherwise the rank variable belongs to
            another launcher.
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


# A batch script has SLURM_PROCID=0 too; only tasks of a step have SLURM_STEP_ID, or since Slurm 26.05, one that is
# not negative.
_SRUN = Family("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID", (), ("SLURM_NODEID",),
               tasks_per_node="SLURM_STEP_TASKS_PER_NODE", requires=("SLURM_STEP_ID",))
# dist.setup sets LOCAL_SIZE for DeepSpeed.
_TORCH = Family("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
                ("GROUP_RANK", "NODE_RANK"))

_HIGH_PRECEDENCE = (
    _TORCH,
    Family("launch", LOCAL_RANK_VARIABLE, (WORLD_SIZE_VARIABLE,), LOCAL_RANK_VARIABLE, (WORLD_SIZE_VARIABLE,)),
    # PALS has no variable for the size: use PMI's under Cray PMI, and launch's under PMIx.
    Family("Cray PALS", "PALS_RANKID", ("PMI_SIZE", WORLD_SIZE_VARIABLE), "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",),
           ("PALS_NODEID",)),
    # OMPI_COMM_WORLD_NODE_RANK is the local rank, not the node rank.
    Family("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK",
           ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Family("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK",
           ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Family("Hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",),
           requires=("MPI_LOCALRANKID",)),
    _SRUN._replace(name="srun with PMI", rank="PMI_RANK", size=("PMI_SIZE",),
            requires=("SLURM_STEP_ID", "SLURM_LOCALID")),
    Family("PMI", "PMI_RANK", ("PMI_SIZE",), "PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    Family("PMIx", "PMIX_RANK", (WORLD_SIZE_VARIABLE,), "PMIX_LOCAL_RANK"),
)
_JOB_STEPS = (
    Family("jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_LOCAL_RANK",
           ("JSM_NAMESPACE_LOCAL_SIZE",)),
    Family("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES"),
    _SRUN,
)
FAMILIES = (*_HIGH_PRECEDENCE, *_JOB_STEPS)
"""In order of precedence. `_families` inserts plug-in launchers between the groups: their ranks may run mpiexec."""

MPI_FAMILIES = ("Cray PALS", "Open MPI", "MVAPICH", "Hydra", "PMI", "jsrun")
"""Prefixes of the names of families whose ranks form one MPI world."""


class _Reading(NamedTuple):
    """Values of one family's variables; None if not set."""

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None


def names_for_ranks(families: Sequence[Family]) -> dict[str, str]:
    """Return the variable that passes plug-in families to `find_rank`; empty if there are none."""
    return {RANK_NAMES_VARIABLE: json.dumps([family._asdict() for family in families])} if families else {}


def _families(env: Mapping[str, str]) -> tuple[Family, ...]:
    text = env.get(RANK_NAMES_VARIABLE)
    if not text:
        return FAMILIES
    plugin_families = as_type(tuple[Family, ...], parse_json(text, RANK_NAMES_VARIABLE), RANK_NAMES_VARIABLE)
    return (*_HIGH_PRECEDENCE, *plugin_families, *_JOB_STEPS)


def find_rank(env: Mapping[str, str]) -> RankInfo:
    """Read the rank of this process from `env`; without a launcher it is rank 0 of 1.

    Values that the preferred family lacks, such as the local rank when RANK was set manually, come from other
    families that have the same rank and size, else from launch's plan. A node rank that is in neither is computed,
    assuming that all nodes have the same number of consecutive ranks.

    Raises:
        UserError: a rank is set without a world size or vice versa, or a value is invalid.
    """
    _require_rank_and_size(env)
    # PMI_RANK belongs to three families: use the first of them whose other variables are set.
    table = _families(env)
    by_rank_variable = {family.rank: family for family in reversed(table) if _is_set(family, env)}
    families = sorted(by_rank_variable.values(), key=table.index)
    if _is_set_by_shim(env):
        families.sort(key=lambda family: family is _TORCH)
    if not families:
        _reject_rank_without_size(env)
        return RankInfo(0, 1, 0, 1, 0, ALONE)
    chosen = _read(families[0], env)
    agreeing, notes = [chosen], []
    for family in families[1:]:
        try:
            other = _read(family, env)
        except UserError as error:
            notes.append(f"{error.found}; using {chosen.source}")
            continue
        if (other.rank, other.world_size) == (chosen.rank, chosen.world_size):
            agreeing.append(other)
        else:
            notes.append(f"{other.source} says rank {other.rank} of {other.world_size}, {chosen.source} says rank "
                         f"{chosen.rank} of {chosen.world_size}: using the latter")
    return _complete(agreeing, notes, _tasks_per_node(env.get(RANKS_PER_NODE_VARIABLE, "")))


def rank_variables(info: RankInfo) -> dict[str, str]:
    """Return the rank variables that torch, DeepSpeed, accelerate and most scripts read."""
    return {"RANK": str(info.rank), "WORLD_SIZE": str(info.world_size), "LOCAL_RANK": str(info.local_rank),
            "LOCAL_WORLD_SIZE": str(info.local_size), "NODE_RANK": str(info.node_rank),
            RANK_VARIABLE: str(info.rank), RANK_SOURCE_VARIABLE: info.source}


def leftover_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return torch's rank variables that no launcher of this process has set.

    An example is a RANK that was exported in the shell for another program. A rank that is set up manually has
    MASTER_ADDR and MASTER_PORT too (see `is_set_by_user`).
    """
    if TORCHELASTIC_VARIABLE in env or RANK_VARIABLE in env or is_set_by_user(env):
        return ()
    return tuple(name for name in TORCHS_OWN if env.get(name))


def is_set_by_user(env: Mapping[str, str]) -> bool:
    """Return True if RANK and MASTER_ADDR were set by hand or by a Kubernetes operator, not by a known launcher."""
    return (TORCHELASTIC_VARIABLE not in env and RANK_VARIABLE not in env
            and all(env.get(name) for name in _RENDEZVOUS_NAMES))


def _is_set_by_shim(env: Mapping[str, str]) -> bool:
    """Return True if the shim set torch's variables, rather than torchrun or a script inside the rank."""
    return (bool(env.get(RANK_SOURCE_VARIABLE)) and env.get("RANK") == env.get(RANK_VARIABLE)
            and env.get("WORLD_SIZE") == env.get(WORLD_SIZE_VARIABLE)
            and (TORCHELASTIC_VARIABLE in env) == env[RANK_SOURCE_VARIABLE].startswith(_TORCH.name))


def _complete(agreeing: list[_Reading], notes: list[str], planned: list[int]) -> RankInfo:
    """Complete the first reading from the other readings, from launch's plan, or by computation."""
    rank, world_size, source = agreeing[0].rank, agreeing[0].world_size, agreeing[0].source
    local_rank = next((reading.local_rank for reading in agreeing if reading.local_rank is not None), None)
    local_size = next((reading.local_size for reading in agreeing if reading.local_size is not None), None)
    position = _planned_position(rank, world_size, planned)
    if local_rank is None and position is not None:
        local_rank, local_size = position[1:]
    if local_rank is None:
        if world_size > 1:
            notes.append(f"{source} does not set a local rank: assuming one rank per node")
        local_rank, local_size = 0, 1
    elif local_size is None:
        local_size = position[2] if position is not None and position[1] == local_rank else world_size
    if local_rank >= local_size:
        raise UserError(f"local rank {local_rank} is invalid for {local_size} ranks on the node",
                        where=f"environment ({source})")
    node_rank = next((reading.node_rank for reading in agreeing if reading.node_rank is not None
                      and reading.local_rank in (None, local_rank)), None)
    if node_rank is None and position is not None and position[1:] == (local_rank, local_size):
        node_rank = position[0]
    if node_rank is None:
        node_rank = (rank - local_rank) // local_size
    return RankInfo(rank, world_size, local_rank, local_size, node_rank, source, tuple(notes))


def _planned_position(rank: int, world_size: int, planned: list[int]) -> tuple[int, int, int] | None:
    """Return node rank, local rank and local size from launch's plan; None if its world size differs."""
    if sum(planned) != world_size:
        return None
    first = 0
    for node, count in enumerate(planned):
        if rank < first + count:
            return node, rank - first, count
        first += count
    return None


def _is_set(family: Family, env: Mapping[str, str]) -> bool:
    return _has_rank(family, env) and _first_set(family.size, env) is not None


def _has_rank(family: Family, env: Mapping[str, str]) -> bool:
    required = [env.get(name) for name in family.requires]
    return bool(env.get(family.rank)) and all(value and not value.startswith("-") for value in required)


def _require_rank_and_size(env: Mapping[str, str]) -> None:
    for present, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.get(present) and not env.get(missing):
            raise UserError(f"{present}={env[present]} is set, but {missing} is not", where="environment",
                            instead=f"unset {present} if it is a leftover, or set both")


def _reject_rank_without_size(env: Mapping[str, str]) -> None:
    # Without this error, every rank would become rank 0 of 1.
    for family in _families(env):
        if _has_rank(family, env):
            raise UserError(f"{family.rank}={env[family.rank]} is set, but {' and '.join(family.size)}"
                            f" {'is' if len(family.size) == 1 else 'are'} not",
                            where=f"environment ({family.name})",
                            instead=f"start with launch, or unset {family.rank} if it is a leftover")


def _read(family: Family, env: Mapping[str, str]) -> _Reading:
    size = _first_set(family.size, env) or family.size[0]
    rank, world_size = _read_int(family.rank, env), _read_int(size, env)
    if not rank < world_size:
        raise UserError(f"{family.rank}={rank} is not a rank of {size}={world_size}", where="environment")
    node_rank = _read_optional_int(_first_set(family.node_rank, env), env)
    source = env[RANK_SOURCE_VARIABLE] if family is _TORCH and _is_set_by_shim(env) else (
        f"{family.name} ({family.rank})")
    return _Reading(source, rank, world_size, _read_optional_int(family.local_rank, env),
                    _local_size(family, env, world_size, node_rank), node_rank)


def _local_size(family: Family, env: Mapping[str, str], world_size: int, node_rank: int | None) -> int | None:
    if name := _first_set(family.local_size, env):
        return _read_int(name, env)
    if family.tasks_per_node is not None:
        counts = _tasks_per_node(env.get(family.tasks_per_node, ""))
        return counts[node_rank] if node_rank is not None and node_rank < len(counts) else None
    nodes = _read_optional_int(family.nodes, env)
    return -(-world_size // nodes) if nodes else None


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "2(x2),1" to [2, 2, 1]; return [] if invalid: other variables hold the same information."""
    try:
        return expand_counts(text) if text else []
    except UserError:
        return []


def _first_set(names: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _read_optional_int(name: str | None, env: Mapping[str, str]) -> int | None:
    return _read_int(name, env) if name and env.get(name) else None


def _read_int(name: str, env: Mapping[str, str]) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", env[name].strip()):
        raise UserError(f"{name}={shorten_value(env[name])} is not a whole number", where="environment")
    return int(env[name])
