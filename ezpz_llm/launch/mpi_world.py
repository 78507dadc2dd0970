"""Does an MPI in the program learn of its world from what starts the ranks? Under srun's plug-in `none`, under
torchrun, and under another MPI's launcher each rank's MPI is a world of one, and says nothing. Some of it is seen
before the start, in the program's file; the rest in the running ranks' libraries and variables."""

from __future__ import annotations

import mmap
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ezpz_llm.base import UserError, ask_command, system_text
from ezpz_llm.launch.variables import TORCHELASTIC_VARIABLE

PLUGIN_VARIABLE = "SLURM_MPI_TYPE"
"""What srun takes for `--mpi`."""
NO_PLUGIN = "none"

_IMPORT = re.compile(rb"^(?:from|import)[ \t]+mpi4py\b", re.MULTILINE)
_NEEDED = re.compile(rb"lib(?:mpi|mpich|mpi_cray|mpi_gnu_\d+)\.so[.\d]*")
_NEEDED_OF_OPEN_MPI = re.compile(rb"libmpi\.so\.[24]0|libopen-rte\.so")
_MOST_SCRIPT_BYTES = 1 << 20
_SPOKEN, _SPOKEN_BY_OPEN_MPI = ("pmi2", "pmix"), ("pmix",)
"""Plug-ins in the order in which an MPI speaks them. A site whose MPI wants cray_shasta has it as its default."""


def use_of_mpi(program: str, env: Mapping[str, str]) -> tuple[str, bool] | None:
    """How the file of a program shows that it uses MPI, and whether that is Open MPI; None where nothing shows it.

    A Python script that imports mpi4py at its top, or an executable that needs an MPI library.
    """
    path = shutil.which(program, path=env.get("PATH")) or program
    try:
        with Path(path).open("rb") as file:
            if file.read(4) != b"\x7fELF":
                file.seek(0)
                return ("imports mpi4py", False) if _IMPORT.search(file.read(_MOST_SCRIPT_BYTES)) else None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = _NEEDED.search(content)
                return (f"needs {found[0].decode()}", bool(_NEEDED_OF_OPEN_MPI.search(content))) if found else None
    except (OSError, ValueError):
        return None


def mpi_settings(launcher: str, words: Sequence[str], program: str, ranks: int,
                 env: Mapping[str, str], effort: tuple[float, int]) -> dict[str, tuple[str, str]]:
    """Variables, with value and reason, that make one world of the MPIs of several ranks, where the launcher leaves
    them alone.

    Nothing is asked of Slurm unless the program uses MPI.

    Args:
        launcher: its kind; `words` are its command line, `program` is the file of what each rank runs.
        effort: seconds for a question to Slurm, and tries.

    Raises:
        UserError: each rank would be a world of its own.
    """
    if ranks == 1 or launcher not in ("srun", "torchrun") or (use := use_of_mpi(program, env)) is None:
        return {}
    how, is_open_mpi = f"{Path(program).name} {use[0]}", use[1]
    if launcher == "torchrun":
        raise _alone(how, ranks, "torchrun, which tells an MPI nothing",
                     "--launcher mpiexec, or srun in a Slurm job")
    if any(word.startswith("--mpi") for word in words) or env.get(PLUGIN_VARIABLE, NO_PLUGIN) != NO_PLUGIN:
        return {}
    source = f"{PLUGIN_VARIABLE}={NO_PLUGIN}"
    offered = offered_plugins(ask_command(["srun", "--mpi=list"], env, *effort).text or "")
    wanted = [name for name in (_SPOKEN_BY_OPEN_MPI if is_open_mpi else _SPOKEN) if name in offered]
    if not env.get(PLUGIN_VARIABLE):
        config = ask_command(["scontrol", "show", "config"], env, *effort).text or ""
        default = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
        if default is None or default[1] != NO_PLUGIN:
            return {}
        source = f"MpiDefault={NO_PLUGIN}"
        if wanted:
            return {PLUGIN_VARIABLE: (wanted[0], f"{how}, and {source} would leave each rank alone")}
    raise _alone(how, ranks, source, f"{PLUGIN_VARIABLE}={wanted[0] if wanted else 'pmi2'} launch …; this srun "
                 f"offers {', '.join(offered) or 'what srun --mpi=list names'}")


def offered_plugins(text: str) -> list[str]:
    """The plug-ins that `srun --mpi=list` names, one a line after a heading, but `none`; newer versions indent
    them, and add versions of pmix in a line of their own."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    return [line for line in lines if re.fullmatch(r"[a-z][\w.]*", line) and line != NO_PLUGIN]


def _alone(how: str, ranks: int, where: str, instead: str) -> UserError:
    return UserError(f"{how}, and the MPI of each of {ranks} ranks would be alone: rank 0 of 1", where=where,
                     instead=instead)


# What a running rank shows.
_FIRST_LOOKS_S, _LATER = 10.0, 2.0
"""Once a second at first, when libraries are loaded; then at times that grow by this factor."""
_MOST_PROCESSES = 4
_LOADED = re.compile(r"/(lib(?:mpi|mpich|mpi_\w+|open-pal|open-rte|pmi2?|pmix|pals)\.so[.\d]*)$", re.MULTILINE)
_LOADED_OF_OPEN_MPI = ("libopen-", "libmpi.so.20", "libmpi.so.40")
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
    if any(name.startswith(_LOADED_OF_OPEN_MPI) for name in libraries):
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
            if libraries := set(_LOADED.findall(system_text(f"/proc/{pid}/maps"))):
                words = system_text(f"/proc/{pid}/environ", errors="surrogateescape").split("\0")
                env = dict(word.split("=", 1) for word in words if "=" in word)
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


def _any(env: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(prefixes) for name in env)
