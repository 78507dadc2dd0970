"""An MPI in a rank that nothing has told of its world: it is alone, rank 0 of 1, and does not say so."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ezpz_llm.launch.variables import TORCHELASTIC_VARIABLE

_FIRST_LOOKS_S, _LATER = 10.0, 2.0
"""Once a second at first, when libraries are loaded; then at times that grow by this factor."""
_MOST_PROCESSES = 4
_LIBRARY = re.compile(r"/(lib(?:mpi|mpich|mpi_\w+|open-pal|open-rte|pmi2?|pmix|pals)\.so[.\d]*)$", re.MULTILINE)
_OPEN_MPI = ("libopen-", "libmpi.so.20", "libmpi.so.40")
_OLD_PMI = ("libpmi.so", "libpmi2.so", "libpals.so")
"""By these a process reaches a launcher without the variables that we know."""


def lonely_mpi(libraries: Collection[str], env: Mapping[str, str]) -> str | None:
    """The MPI among a process's libraries that no variable of `env` tells of its world, with its maker; None where
    there is no MPI, or where it may have been told.

    MPICH, Intel MPI and Cray MPICH ask PMI, or PMIx where they have its library. Open MPI asks PMIx.
    """
    mpi = next((name for name in sorted(libraries) if name.startswith(("libmpi", "libopen-"))), None)
    if mpi is None or any(name.startswith(_OLD_PMI) for name in libraries):
        return None
    if any(name.startswith(_OPEN_MPI) for name in libraries):
        is_told = _any(env, ("PMIX_", "OMPI_COMM_WORLD_"))
        return None if is_told else f"Open MPI ({mpi})"
    has_pmix = any(name.startswith("libpmix") for name in libraries)
    is_told = _any(env, ("PMI_", "PALS_")) or (has_pmix and _any(env, ("PMIX_",)))
    return None if is_told else f"MPICH or one of its kind ({mpi})"


class MpiWatch:
    """Looks into the processes of one rank of the node from time to time: what is so there is so in all."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._began = self._look_at = time.monotonic()
        self.found: str | None = None

    def look(self, pids: Iterable[int], now: float) -> bool:
        """See whether an MPI in one of these processes is alone; True where the first one is found to be."""
        if self.found is not None or now < self._look_at or self._ranks == 1:
            return False
        age = now - self._began
        self._look_at = now if age < _FIRST_LOOKS_S else self._began + _LATER * age
        for pid in list(pids)[:_MOST_PROCESSES]:
            if libraries := _libraries_of(pid):
                env = _environment_of(pid)
                if env and (mpi := lonely_mpi(libraries, env)):
                    self.found = _line(mpi, self._ranks, env)
        return self.found is not None


def _line(mpi: str, ranks: int, env: Mapping[str, str]) -> str:
    if env.get(TORCHELASTIC_VARIABLE):
        why, instead = "torchrun tells an MPI nothing", "--launcher mpiexec, or srun in a Slurm job"
    elif env.get("SLURM_STEP_ID") and not _any(env, ("PMI_", "PMIX_")):
        why = f"srun had no MPI plug-in: SLURM_MPI_TYPE={env.get('SLURM_MPI_TYPE', 'none')}"
        instead = "SLURM_MPI_TYPE=pmi2 launch …, or pmix, as srun --mpi=list offers and this MPI speaks"
    else:
        why, instead = "the launcher is of another MPI", "the mpiexec that belongs to it first on PATH"
    return (f"the ranks load {mpi}, which nothing tells of its {ranks} ranks: in each of them MPI is rank 0 of 1"
            f" ({why}); if they are to talk by MPI: {instead}")


def _libraries_of(pid: int) -> set[str]:
    try:
        return set(_LIBRARY.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


def _environment_of(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


def _any(env: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(prefixes) for name in env)
