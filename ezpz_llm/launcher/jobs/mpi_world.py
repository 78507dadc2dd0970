"""Detection of ranks whose MPI library silently forms a world of size 1.

This happens under srun's plug-in `none`, under torchrun, and under the launcher of another MPI. Some cases are
detected in the program's file before it starts, the others in the libraries and variables of running ranks.
"""

from __future__ import annotations

import mmap
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ezpz_llm.core.base import system_text
from ezpz_llm.launcher.basics.variables import LOCAL_RANK_VARIABLE, TORCHELASTIC_VARIABLE
from ezpz_llm.launcher.jobs.schedulers import schedulers

_IMPORT = re.compile(rb"^(?:from|import)[ \t]+mpi4py\b", re.MULTILINE)
_NEEDED = re.compile(rb"lib(?:mpi|mpich|mpi_cray|mpi_gnu_\d+)\.so[.\d]*")
_NEEDED_OF_OPEN_MPI = re.compile(rb"libmpi\.so\.[24]0|libopen-rte\.so")
_MAX_SCRIPT_BYTES = 1 << 20


def detect_mpi(program: str, env: Mapping[str, str]) -> tuple[str, bool] | None:
    """Detect MPI in a program file: a script that imports mpi4py, or an executable linked to an MPI library.

    Returns:
        The evidence, and True for Open MPI; None if there is no evidence.
    """
    path = shutil.which(program, path=env.get("PATH")) or program
    try:
        with Path(path).open("rb") as file:
            if file.read(4) != b"\x7fELF":
                file.seek(0)
                return ("imports mpi4py", False) if _IMPORT.search(file.read(_MAX_SCRIPT_BYTES)) else None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                name = _NEEDED.search(content)
                return (f"needs {name[0].decode()}", bool(_NEEDED_OF_OPEN_MPI.search(content))) if name else None
    except (OSError, ValueError):
        return None


_FIRST_CHECKS_S, _AGE_FACTOR = 10.0, 2.0
"""Check at every poll for the first 10 s, while libraries are loaded, then each time the age has grown by a factor
of `_AGE_FACTOR`."""
_MAX_PROCESSES = 4
_LOADED = re.compile(r"/(lib(?:mpi|mpich|mpi_\w+|open-pal|open-rte|pmi2?|pmix|pals)\.so[.\d]*)$", re.MULTILINE)
_LOADED_OF_OPEN_MPI = ("libopen-", "libmpi.so.20", "libmpi.so.40")
_CONNECTS_WITHOUT_VARIABLES = ("libpmi.so", "libpmi2.so", "libpals.so")
"""Libraries that can connect to a launcher without the variables that are checked here."""


def find_disconnected_mpi(libraries: Collection[str], env: Mapping[str, str]) -> str | None:
    """Return a description of the loaded MPI if no variable in `env` connects it to a launcher.

    None if a variable connects it, if unsure, or without MPI.
    MPICH, Intel MPI and Cray MPICH use PMI, or PMIx if its library is loaded. Open MPI uses PMIx.

    Args:
        libraries: file names of the loaded libraries.
    """
    mpi = next((name for name in sorted(libraries) if name.startswith(("libmpi", "libopen-"))), None)
    if mpi is None or any(name.startswith(_CONNECTS_WITHOUT_VARIABLES) for name in libraries):
        return None
    if any(name.startswith(_LOADED_OF_OPEN_MPI) for name in libraries):
        is_connected = _has_prefix(env, ("PMIX_", "OMPI_COMM_WORLD_"))
        return None if is_connected else f"Open MPI ({mpi})"
    has_pmix = any(name.startswith("libpmix") for name in libraries)
    is_connected = _has_prefix(env, ("PMI_", "PALS_")) or (has_pmix and _has_prefix(env, ("PMIX_",)))
    return None if is_connected else f"MPICH or a derivative ({mpi})"


class MpiWatch:
    """Periodic check of the processes of one rank per node, since all ranks use the same libraries."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._began = self._check_at = time.monotonic()
        self.message: str | None = None

    def check(self, pids: Iterable[int], now: float) -> bool:
        """Check the processes; return True if an MPI with a world of size 1 was found, the first time only."""
        if self.message is not None or now < self._check_at or self._ranks == 1:
            return False
        age = now - self._began
        self._check_at = now if age < _FIRST_CHECKS_S else self._began + _AGE_FACTOR * age
        for pid in list(pids)[:_MAX_PROCESSES]:
            if libraries := set(_LOADED.findall(system_text(f"/proc/{pid}/maps"))):
                assignments = system_text(f"/proc/{pid}/environ", errors="surrogateescape").split("\0")
                env = dict(assignment.split("=", 1) for assignment in assignments if "=" in assignment)
                if env and (mpi := find_disconnected_mpi(libraries, env)):
                    self.message = _message(mpi, self._ranks, env)
        return self.message is not None


def _message(mpi: str, ranks: int, env: Mapping[str, str]) -> str:
    if env.get(TORCHELASTIC_VARIABLE):
        reason, instead = "torchrun does not support MPI", "--launcher mpiexec, or srun in a Slurm job"
    elif env.get(LOCAL_RANK_VARIABLE):
        reason, instead = "launch found no mpiexec", "put the mpiexec of this MPI on PATH"
    elif advice := next(filter(None, (scheduler.mpi_advice(env) for scheduler in schedulers().values())), None):
        reason, instead = advice
    else:
        reason, instead = "the launcher belongs to another MPI", "put the mpiexec of this MPI first on PATH"
    return (f"the ranks load {mpi}, but are not connected: each of the {ranks} ranks is alone in its own MPI world"
            f" (rank 0 of 1), because {reason}; if they communicate through MPI: {instead}")


def _has_prefix(env: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(prefixes) for name in env)
