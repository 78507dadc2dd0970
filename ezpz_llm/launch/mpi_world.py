"""Will an MPI in the program learn of its world from what starts the ranks? Under srun's plug-in `none`, and under
torchrun, each rank's MPI is a world of one, and says nothing. node/mpi.py sees what only a running rank shows."""

from __future__ import annotations

import mmap
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.environment import Setting
from ezpz_llm.launch.schedulers.asking import ask_command

PLUGIN_VARIABLE = "SLURM_MPI_TYPE"
"""What srun takes for `--mpi`."""
NO_PLUGIN = "none"

_IMPORT = re.compile(rb"^(?:from|import)[ \t]+mpi4py\b", re.MULTILINE)
_LIBRARY = re.compile(rb"lib(?:mpi|mpich|mpi_cray|mpi_gnu_\d+)\.so[.\d]*")
_OPEN_MPI = re.compile(rb"libmpi\.so\.[24]0|libopen-rte\.so")
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
                found = _LIBRARY.search(content)
                return (f"needs {found[0].decode()}", bool(_OPEN_MPI.search(content))) if found else None
    except (OSError, ValueError):
        return None


def mpi_settings(launcher: str, words: Sequence[str], program: str, ranks: int,
                 env: Mapping[str, str], effort: tuple[float, int]) -> dict[str, Setting]:
    """What makes one world of the MPIs of several ranks, where the launcher leaves them alone.

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
            return {PLUGIN_VARIABLE: Setting(wanted[0], f"{how}, and {source} would leave each rank alone")}
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
