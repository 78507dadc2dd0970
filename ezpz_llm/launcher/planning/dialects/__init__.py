"""Table of dialects, the command lines of launchers, and choice of the launcher that starts the ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from ezpz_llm.core.base import UserError, entry_points
from ezpz_llm.launcher.jobs.schedulers import schedulers
from ezpz_llm.launcher.jobs.schedulers.scheduler import StepLauncher, job_of
from ezpz_llm.launcher.planning.dialects import flux, hydra, jsrun, openmpi, pals, srun, this_node, torchrun
from ezpz_llm.launcher.planning.dialects.work import DIRECT, THIS_LAUNCH, Dialect, Launcher
from ezpz_llm.launcher.planning.rank_binding import CoreOption

_VERSION_TIMEOUT_S = 20

DIALECTS = (
    Dialect("MPICH/Hydra", r"HYDRA build details", hydra.build_mpich, runs_mpi=True),
    Dialect("Intel MPI", r"Intel\(R\) MPI Library(?:.*Version (?P<version>[\w.]+))?", hydra.build_intel,
            runs_mpi=True),
    Dialect("Open MPI", r"\w+ \(OpenRTE\) (?P<version>[\w.]+)", openmpi.build_4, runs_mpi=True),
    Dialect("Open MPI", r"\w+ \(Open MPI\) (?P<version>[\w.]+)", openmpi.build_5, runs_mpi=True),
    # "mpiexec version 1.8.0 revision …": the form that public code for these machines parses; not captured.
    Dialect("Cray PALS", r"mpiexec version (?P<version>\d[\w.]*)", pals.build, site_name="pals",
            cores=CoreOption.COUNT, device_options=("--gpu-bind",), runs_mpi=True),
    Dialect("Slurm", None, srun.build, cores=CoreOption.SCHEDULER, device_options=("--gpus-per-task", "--gpu-bind"),
            runs_mpi=True),
    Dialect("Flux", None, flux.build),
    Dialect("IBM JSM", None, jsrun.build, cores=CoreOption.NONE),
)
"""Built-in dialects, tried before those of plug-ins."""

ENTRY_POINTS = "ezpz_llm.dialects"

_PBS_WRAPPER = re.compile(r"\s*pbs_version\b")


def dialects() -> Iterator[Dialect]:
    """Yield all dialects: the built-in ones, then plug-ins registered under `ENTRY_POINTS`."""
    yield from DIALECTS
    yield from entry_points(ENTRY_POINTS, _plugin_problem)


def _plugin_problem(plugin: object) -> str | None:
    if not isinstance(plugin, Dialect):
        return f"it is a {type(plugin).__name__}, not an ezpz_llm.launcher.planning.dialects.work.Dialect"
    # No check for duplicates: the built-in dialects are tried first, so that a plugin cannot replace them.
    re.compile(plugin.first_line or "")
    return None


def dialect_of_site(name: str | None) -> Dialect | None:
    """Return the dialect that site files call `name`, or None."""
    return next((dialect for dialect in dialects() if dialect.site_name == name), None) if name else None


def choose_launcher(wanted: str, scheduler: str, world_size: int, env: Mapping[str, str],
                    site_dialect: str | None = None) -> Launcher:
    """Return the launcher `wanted`, or for "auto" the first that is available.

    "auto" prefers, in a job, the scheduler's step launcher (srun, flux), then mpiexec, then for a single rank no
    launcher, then torchrun. Without any of them, launch itself starts the ranks of this node. PBS's own mpiexec
    wrapper is skipped with a note.

    Args:
        site_dialect: the site's name of the dialect to use if no dialect matches the mpiexec's version text.

    Raises:
        UserError: the launcher is not on PATH, or it is an unknown mpiexec.
    """
    if wanted == "auto" and (step_launcher := _step_launcher(scheduler, env)):
        return _from_step_launcher(step_launcher, job_of(schedulers()[scheduler].TITLE), env)
    for candidate in schedulers().values():
        if (step_launcher := candidate.step_launcher()) and step_launcher.program == wanted:
            return _from_step_launcher(step_launcher, "--launcher", env)
    starter = partial(_choose_starter, scheduler, env, site_dialect)
    if wanted == "torchrun":
        return _torchrun(_require_program("torchrun", "--launcher", env), "--launcher", starter)
    if wanted == "mpiexec":
        return _mpiexec("--launcher", env, site_dialect)
    mpiexec, skip_notes = _find_mpiexec("auto: mpiexec found", env, site_dialect)
    if mpiexec:
        return mpiexec
    if world_size == 1:
        return Launcher(THIS_LAUNCH, DIRECT, "", "auto: one rank, no mpiexec found", notes=skip_notes)
    if program := next(_find_programs("torchrun", env), None):
        return _torchrun(program, "auto: torchrun found, no mpiexec", starter)._replace(notes=skip_notes)
    return Launcher(THIS_LAUNCH, this_node.DIALECT, sys.executable, "auto: neither mpiexec nor torchrun found",
                    notes=skip_notes)


def _choose_starter(scheduler: str, env: Mapping[str, str], site_dialect: str | None) -> Launcher:
    """Return the launcher that starts one torchrun on each of several nodes."""
    source = "--launcher torchrun on other nodes"
    if step_launcher := _step_launcher(scheduler, env):
        return _from_step_launcher(step_launcher, source, env)
    return _mpiexec(source, env, site_dialect)


def _step_launcher(name: str, env: Mapping[str, str]) -> StepLauncher | None:
    scheduler = schedulers().get(name)
    launcher = scheduler.step_launcher() if scheduler else None
    return None if launcher and launcher.optional and not any(_find_programs(launcher.program, env)) else launcher


def _from_step_launcher(launcher: StepLauncher, source: str, env: Mapping[str, str]) -> Launcher:
    program = _require_program(launcher.program, source, env)
    dialect = next((dialect for dialect in dialects() if dialect.title == launcher.dialect), None)
    if dialect is None:
        raise UserError(f"no installed package has the dialect {launcher.dialect!r} of {launcher.program}",
                        where=f"entry points {ENTRY_POINTS}", instead="--launcher mpiexec, or reinstall the package"
                        " that starts ranks with this program")
    return Launcher(launcher.program, dialect, program, source)


def _require_program(program: str, source: str, env: Mapping[str, str]) -> str:
    for path in _find_programs(program, env):
        return path
    raise _not_on_path(program, source)


def _not_on_path(program: str, where: str) -> UserError:
    return UserError(f"{program} is not on PATH", where=where,
                     instead="load its module, or choose another --launcher")


def _find_programs(program: str, env: Mapping[str, str]) -> Iterator[str]:
    # First PATH, which has the site's programs. Then the folder of this Python and the one in which
    # launchers/with-env installs MPICH, for shells without a PATH for this environment, such as job scripts.
    python_folder = os.path.dirname(sys.executable)
    folders = [*env.get("PATH", os.defpath).split(os.pathsep), python_folder,
               os.path.join(os.path.dirname(python_folder), "mpi")]
    for folder in dict.fromkeys(filter(None, folders)):
        if path := shutil.which(program, path=folder):
            yield path


def _torchrun(program: str, source: str, starter: Callable[[], Launcher]) -> Launcher:
    build = partial(torchrun.build, starter=starter)
    return Launcher("torchrun", Dialect("torch elastic", None, build, cores=CoreOption.NONE), program, source)


def _mpiexec(source: str, env: Mapping[str, str], site_dialect: str | None) -> Launcher:
    launcher, skip_notes = _find_mpiexec(source, env, site_dialect)
    if launcher is None:
        raise _not_on_path("mpiexec", "; ".join((source, *skip_notes)))
    return launcher


def _find_mpiexec(source: str, env: Mapping[str, str],
                  site_dialect: str | None) -> tuple[Launcher | None, tuple[str, ...]]:
    """Return the first mpiexec that belongs to an MPI, or None, and a note for each mpiexec that was skipped."""
    skip_notes: list[str] = []
    for program in _find_programs("mpiexec", env):
        text = _version_text(program)
        if not _PBS_WRAPPER.match(text):
            launcher = identify(text, program, source, site_dialect)
            return launcher._replace(notes=(*skip_notes, *launcher.notes)), tuple(skip_notes)
        # PBS's profile.d puts it on every user's PATH. It wraps one vendor's mpirun and is not an MPI itself.
        skip_notes.append(f"skipping {program}: it is PBS's own wrapper, not the mpiexec of an MPI")
    return None, tuple(skip_notes)


def _version_text(program: str) -> str:
    try:
        result = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                                timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`mpiexec --version` failed: {error}", where=program,
                        instead="choose another --launcher") from error
    return (result.stdout + result.stderr).decode(errors="replace")


def identify(version_text: str, program: str, source: str, site_dialect: str | None = None) -> Launcher:
    """Return the launcher with the dialect that `mpiexec --version` shows in its first line, else the site's.

    Raises:
        UserError: no dialect matches the line, and the site file names none.
    """
    first = next((line.strip() for line in version_text.splitlines() if line.strip()), "")
    default_dialect = dialect_of_site(site_dialect)
    for dialect in dialects():
        if dialect.first_line is not None and (match := re.match(dialect.first_line, first)):
            version = match.groupdict().get("version") or _hydra_version(version_text)
            launcher = Launcher("mpiexec", dialect, program, source, version)
            if default_dialect and dialect.title != default_dialect.title:
                return launcher._replace(notes=(f"{program} is {launcher.title}, but the site's mpiexec is"
                                                f" {default_dialect.title}: a Python environment's mpiexec may"
                                                " precede it on PATH",))
            return launcher
    if default_dialect:
        return Launcher("mpiexec", default_dialect, program, f"{source}; the site's dialect")
    raise UserError(f"unknown mpiexec; its version text begins with {first!r}", where=program,
                    instead="put the mpiexec of MPICH, Intel MPI, Open MPI or Cray PALS first on PATH, name the "
                            "--site, or use --launcher")


def _hydra_version(text: str) -> str:
    match = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
