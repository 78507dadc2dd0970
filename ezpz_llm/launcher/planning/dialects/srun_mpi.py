"""MPI programs under srun, whose default may be no plug-in for MPI, and torchrun, which does not support MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, ask_command
from ezpz_llm.launcher.jobs.mpi_world import detect_mpi

_PLUGIN_VARIABLE = "SLURM_MPI_TYPE"
"""Variable that sets srun's default for `--mpi`."""
_NO_PLUGIN = "none"

_SUPPORTED, _SUPPORTED_BY_OPEN_MPI = ("pmi2", "pmix"), ("pmix",)
"""Plug-ins in order of preference. A site whose MPI requires cray_shasta has it as the default."""


def mpi_settings(launcher: str, words: Sequence[str], program: str, ranks: int,
                 env: Mapping[str, str], query_limits: tuple[float, int]) -> dict[str, tuple[str, str]]:
    """Return variables, each with value and reason, with which the ranks form one MPI world.

    Empty if the program does not use MPI, in which case Slurm is not queried, or if the launcher's defaults work.

    Args:
        launcher: kind of the launcher.
        words: command line of the launcher.
        program: file that each rank runs.
        query_limits: timeout in seconds of a Slurm query, and number of attempts.

    Raises:
        UserError: each rank would form an MPI world of size 1.
    """
    if ranks == 1 or launcher not in ("srun", "torchrun") or (use := detect_mpi(program, env)) is None:
        return {}
    evidence, is_open_mpi = f"{Path(program).name} {use[0]}", use[1]
    if launcher == "torchrun":
        raise _disconnected_error(evidence, ranks, "torchrun, which does not support MPI",
                                  "--launcher mpiexec, or srun in a Slurm job")
    if any(word.startswith("--mpi") for word in words) or env.get(_PLUGIN_VARIABLE, _NO_PLUGIN) != _NO_PLUGIN:
        return {}
    source = f"{_PLUGIN_VARIABLE}={_NO_PLUGIN}"
    offered = offered_plugins(ask_command(["srun", "--mpi=list"], env, *query_limits).text or "")
    supported = _SUPPORTED_BY_OPEN_MPI if is_open_mpi else _SUPPORTED
    plugins = [name for name in supported if name in offered]
    if not env.get(_PLUGIN_VARIABLE):
        config = ask_command(["scontrol", "show", "config"], env, *query_limits).text or ""
        default = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
        if default is None or default[1] != _NO_PLUGIN:
            return {}
        source = f"MpiDefault={_NO_PLUGIN}"
        if plugins:
            return {_PLUGIN_VARIABLE: (plugins[0], f"{evidence}; with {source}, each rank would be alone in its "
                                                   "own MPI world (rank 0 of 1)")}
    if plugins:
        instead = f"{_PLUGIN_VARIABLE}={plugins[0]} launch …; this srun supports {', '.join(offered)}"
    elif offered:
        instead = (f"{_PLUGIN_VARIABLE}=NAME launch …, if this MPI supports one of srun's plug-ins "
                   f"({', '.join(offered)}), or --launcher mpiexec")
    else:
        instead = f"{_PLUGIN_VARIABLE}={supported[0]} launch …; for the plug-ins of this srun, run srun --mpi=list"
    raise _disconnected_error(evidence, ranks, source, instead)


def offered_plugins(text: str) -> list[str]:
    """Return the plug-ins in the output of `srun --mpi=list`, without `none`.

    srun prints one plug-in per line after a heading. Newer versions of srun indent them, and list the versions of
    pmix on a further line.
    """
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    return [line for line in lines if re.fullmatch(r"[a-z][\w.]*", line) and line != _NO_PLUGIN]


def _disconnected_error(evidence: str, ranks: int, where: str, instead: str) -> UserError:
    return UserError(f"{evidence}, and each of the {ranks} ranks would be alone in its own MPI world (rank 0 of 1)",
                     where=where, instead=instead)
