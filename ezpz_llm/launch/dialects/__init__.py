"""Choice of the launcher, the program that starts the ranks, and of its dialect: once, before anything runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ezpz_llm.base import UserError, entry_points
from ezpz_llm.launch.dialects import hydra, openmpi, pals, torchrun, work
from ezpz_llm.launch.dialects.work import Dialect, Launcher
from ezpz_llm.launch.schedulers import schedulers
from ezpz_llm.launch.schedulers.scheduler import StepLauncher, job_of

_VERSION_TIMEOUT_S = 20

DIALECTS = (
    Dialect("MPICH/Hydra", r"HYDRA build details", hydra.build_mpich),
    Dialect("Intel MPI", r"Intel\(R\) MPI Library(?:.*Version (?P<version>[\w.]+))?", hydra.build_intel),
    Dialect("Open MPI", r"\w+ \(OpenRTE\) (?P<version>[\w.]+)", openmpi.build_4),
    Dialect("Open MPI", r"\w+ \(Open MPI\) (?P<version>[\w.]+)", openmpi.build_5),
    # "mpiexec version 1.8.0 revision …", as public code for these machines reads it; not captured by us.
    Dialect("Cray PALS", r"mpiexec version (?P<version>\d[\w.]*)", pals.build, site_name="pals"),
)
"""Our dialects of mpiexec, asked before those of other packages."""

ENTRY_POINTS = "ezpz_llm.dialects"

_OF_PBS = re.compile(r"\s*pbs_version\b")


def dialects() -> Iterator[Dialect]:
    """All dialects of mpiexec: ours, then those that installed packages name under `ENTRY_POINTS`."""
    yield from DIALECTS
    yield from entry_points(ENTRY_POINTS, _wrong)


def _wrong(plugin: object) -> str | None:
    if not isinstance(plugin, Dialect):
        return f"it is a {type(plugin).__name__}, not an ezpz_llm.launch.dialects.work.Dialect"
    # Ours are asked first, so that none can be replaced.
    re.compile(plugin.first_line)
    return None


def dialect_of_site(name: str | None) -> Dialect | None:
    """The dialect that a site file calls `name`; None where none is called so."""
    return next((one for one in dialects() if one.site_name == name), None) if name else None


def choose(wanted: str, scheduler: str, world_size: int, env: Mapping[str, str],
           site_dialect: str | None = None) -> Launcher:
    """The launcher that the user asked for, or (`auto`): the scheduler's own in its job (srun, flux), else mpiexec,
    else for one rank none at all, else torchrun. `site_dialect` is believed of an mpiexec whose version text says
    nothing known. PBS's own wrapper of that name is passed over, and a note says so.

    Raises:
        UserError: it is not there, or an mpiexec of unknown make.
    """
    if wanted == "auto" and (own := _step_launcher(scheduler, env)):
        return _stepping(own, job_of(schedulers()[scheduler].TITLE), env)
    for one in schedulers().values():
        if (own := one.step_launcher()) and own.program == wanted:
            return _stepping(own, "--launcher", env)
    starter = partial(_starter, scheduler, env, site_dialect)
    if wanted == "torchrun":
        return _torchrun(_need("torchrun", "--launcher", env), "--launcher", starter)
    if wanted == "mpiexec":
        return _mpiexec("--launcher", env, site_dialect)
    found, passed_over = _find_mpiexec("auto: mpiexec found", env, site_dialect)
    if found:
        return found
    if world_size == 1:
        return Launcher("direct", "none", "", "auto: one rank, no mpiexec found", work.build, passed_over)
    if program := next(_all("torchrun", env), None):
        return replace(_torchrun(program, "auto: torchrun found, no mpiexec", starter), notes=passed_over)
    raise UserError(f"nothing here can start {world_size} ranks: no mpiexec, no torchrun",
                    where="; ".join(("PATH", *passed_over)),
                    instead="load the site's MPI module, or `pip install mpich`")


def _starter(scheduler: str, env: Mapping[str, str], site_dialect: str | None) -> Launcher:
    """What starts one torchrun on each of several hosts."""
    source = "--launcher torchrun on other hosts"
    if own := _step_launcher(scheduler, env):
        return _stepping(own, source, env)
    return _mpiexec(source, env, site_dialect)


def _step_launcher(scheduler: str, env: Mapping[str, str]) -> StepLauncher | None:
    found = schedulers().get(scheduler)
    own = found.step_launcher() if found else None
    return None if own and own.optional and not any(_all(own.program, env)) else own


def _stepping(own: StepLauncher, source: str, env: Mapping[str, str]) -> Launcher:
    return Launcher(own.program, own.dialect, _need(own.program, source, env), source, own.build)


def _need(program: str, source: str, env: Mapping[str, str]) -> str:
    for found in _all(program, env):
        return found
    raise _not_on_path(program, source)


def _not_on_path(program: str, where: str) -> UserError:
    return UserError(f"{program} is not on PATH", where=where,
                     instead="load its module, or choose another --launcher")


def _all(program: str, env: Mapping[str, str]) -> Iterator[str]:
    # A site's program, on PATH, comes before one beside this Python, which is there where PATH was never set up (as
    # in a job's script): in its own folder, or where launchers/with-env keeps MPICH.
    own = os.path.dirname(sys.executable)
    folders = [*env.get("PATH", os.defpath).split(os.pathsep), own, os.path.join(os.path.dirname(own), "mpi")]
    for folder in dict.fromkeys(filter(None, folders)):
        if found := shutil.which(program, path=folder):
            yield found


def _torchrun(program: str, source: str, starter: Callable[[], Launcher]) -> Launcher:
    return Launcher("torchrun", "torch elastic", program, source, partial(torchrun.build, starter=starter))


def _mpiexec(source: str, env: Mapping[str, str], site_dialect: str | None) -> Launcher:
    found, passed_over = _find_mpiexec(source, env, site_dialect)
    if found is None:
        raise _not_on_path("mpiexec", "; ".join((source, *passed_over)))
    return found


def _find_mpiexec(source: str, env: Mapping[str, str],
                  site_dialect: str | None) -> tuple[Launcher | None, tuple[str, ...]]:
    """The first mpiexec that is an MPI's, None where there is none; and a note for each that was passed over."""
    passed_over: list[str] = []
    for program in _all("mpiexec", env):
        text = _version_text(program)
        if not _OF_PBS.match(text):
            found = identify(text, program, source, site_dialect)
            return replace(found, notes=(*passed_over, *found.notes)), tuple(passed_over)
        # PBS's profile.d puts it on everybody's PATH: it wraps one vendor's mpirun, and is no MPI by itself.
        passed_over.append(f"{program} is passed over: this is PBS's own wrapper, not an MPI's mpiexec")
    return None, tuple(passed_over)


def _version_text(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"mpiexec does not say its version: {error}", where=program,
                        instead="choose another --launcher") from error
    return (done.stdout + done.stderr).decode(errors="replace")


def identify(version_text: str, program: str, source: str, site_dialect: str | None = None) -> Launcher:
    """The dialect that the first line of `mpiexec --version` speaks of; where it speaks of none, the site's.

    Raises:
        UserError: with that line, where it is none that is known and no site file names the dialect.
    """
    first = next((line.strip() for line in version_text.splitlines() if line.strip()), "")
    of_site = dialect_of_site(site_dialect)
    for one in dialects():
        if match := re.match(one.first_line, first):
            version = match.groupdict().get("version") or _hydra_version(version_text)
            found = Launcher("mpiexec", f"{one.title} {version}".strip(), program, source, one.build)
            if of_site and one.title != of_site.title:
                return replace(found, notes=(f"{program} is {found.dialect}, and this site's is {of_site.title}: "
                                             "an environment's own mpiexec may hide it on PATH",))
            return found
    if of_site:
        return Launcher("mpiexec", of_site.title, program, f"{source}; the site's dialect", of_site.build)
    raise UserError(f"an mpiexec of unknown make; its version text begins {first!r}", where=program,
                    instead="put the mpiexec of MPICH, Intel MPI, Open MPI or Cray PALS first on PATH, name the "
                            "--site, or use --launcher")


def _hydra_version(text: str) -> str:
    match = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
