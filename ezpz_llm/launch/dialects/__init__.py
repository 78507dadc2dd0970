"""Which program starts the ranks, and in which dialect it is spoken to: decided once, before anything runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from ezpz_llm.errors import UserError
from ezpz_llm.launch.dialects import direct, hydra, openmpi, srun, torchrun
from ezpz_llm.launch.dialects.work import Launcher
from ezpz_llm.launch.schedulers import slurm

_VERSION_TIMEOUT_S = 20

_BY_FIRST_LINE = (
    (re.compile(r"HYDRA build details"), "MPICH/Hydra", hydra.build),
    (re.compile(r"Intel\(R\) MPI Library(?:.*Version (?P<version>[\w.]+))?"), "Intel MPI", hydra.build),
    (re.compile(r"\w+ \((?:Open MPI|OpenRTE)\) (?P<version>[\w.]+)"), "Open MPI", openmpi.build),
)


def choose(wanted: str, scheduler: str, world_size: int, env: Mapping[str, str]) -> Launcher:
    """The launcher that the user asked for, or (`auto`): srun in a Slurm job, else mpiexec, else for one rank none
    at all, else torchrun.

    Raises:
        UserError: it is not there, or an mpiexec of unknown make.
    """
    if wanted == "srun" or (wanted == "auto" and scheduler == slurm.NAME):
        source = "--launcher" if wanted == "srun" else "a Slurm job"
        return Launcher("srun", "Slurm", _need("srun", source, env), source, srun.build)
    if wanted == "torchrun":
        return _torchrun(_need("torchrun", "--launcher", env), "--launcher")
    if wanted == "mpiexec":
        return _mpiexec(_need("mpiexec", "--launcher", env), "--launcher")
    if program := _which("mpiexec", env):
        return _mpiexec(program, "auto: mpiexec found")
    if world_size == 1:
        return Launcher("direct", "none", "", "auto: one rank, no mpiexec found", direct.build)
    if program := _which("torchrun", env):
        return _torchrun(program, "auto: torchrun found, no mpiexec")
    raise UserError(f"nothing here can start {world_size} ranks: no mpiexec, no torchrun", where="PATH",
                    instead="load the site's MPI module, or `pip install mpich`")


def _need(program: str, source: str, env: Mapping[str, str]) -> str:
    if found := _which(program, env):
        return found
    raise UserError(f"{program} is not on PATH", where=source,
                    instead="load its module, or choose another --launcher")


def _which(program: str, env: Mapping[str, str]) -> str | None:
    # A site's program, on PATH, comes before one beside this Python, which is there where PATH was never set up.
    return (shutil.which(program, path=env.get("PATH", os.defpath))
            or shutil.which(program, path=os.path.dirname(sys.executable)))


def _torchrun(program: str, source: str) -> Launcher:
    return Launcher("torchrun", "torch elastic", program, source, torchrun.build)


def _mpiexec(program: str, source: str) -> Launcher:
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"mpiexec does not say its version: {error}", where=program,
                        instead="choose another --launcher") from error
    return identify((done.stdout + done.stderr).decode(errors="replace"), program, source)


def identify(version_text: str, program: str, source: str) -> Launcher:
    """The dialect that the first line of `mpiexec --version` speaks of.

    Raises:
        UserError: with that line, where it is none that is known.
    """
    first = next((line.strip() for line in version_text.splitlines() if line.strip()), "")
    for pattern, name, build in _BY_FIRST_LINE:
        if match := pattern.match(first):
            version = match.groupdict().get("version") or _hydra_version(version_text)
            return Launcher("mpiexec", f"{name} {version}".strip(), program, source, build)
    raise UserError(f"an mpiexec of unknown make; its version text begins {first!r}", where=program,
                    instead="put the mpiexec of MPICH, Intel MPI or Open MPI first on PATH, or use --launcher")


def _hydra_version(text: str) -> str:
    match = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
