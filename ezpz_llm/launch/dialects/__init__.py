"""Which program starts the ranks, and in which dialect it is spoken to: decided once, before anything runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.dialects import hydra, openmpi, pals, torchrun, work
from ezpz_llm.launch.dialects.work import Launcher
from ezpz_llm.launch.schedulers import schedulers
from ezpz_llm.launch.schedulers.scheduler import StepLauncher

_VERSION_TIMEOUT_S = 20

_BY_FIRST_LINE = (
    (re.compile(r"HYDRA build details"), "MPICH/Hydra", hydra.build_mpich),
    (re.compile(r"Intel\(R\) MPI Library(?:.*Version (?P<version>[\w.]+))?"), "Intel MPI", hydra.build_intel),
    (re.compile(r"\w+ \(OpenRTE\) (?P<version>[\w.]+)"), "Open MPI", openmpi.build_4),
    (re.compile(r"\w+ \(Open MPI\) (?P<version>[\w.]+)"), "Open MPI", openmpi.build_5),
    # "mpiexec version 1.8.0 revision …", as public code for these machines reads it; not captured by us.
    (re.compile(r"mpiexec version (?P<version>\d[\w.]*)"), "Cray PALS", pals.build),
)

_OF_PBS = re.compile(r"\s*pbs_version\b")

SITE_DIALECTS = {"pals": ("Cray PALS", pals.build)}
"""What a site file may say of an mpiexec whose version text is none of the above."""


def choose(wanted: str, scheduler: str, world_size: int, env: Mapping[str, str],
           site_dialect: str | None = None) -> Launcher:
    """The launcher that the user asked for, or (`auto`): the scheduler's own in its job (srun), else mpiexec,
    else for one rank none at all, else torchrun. `site_dialect` is believed of an mpiexec whose version text says
    nothing known. PBS's own wrapper of that name is passed over, and a note says so.

    Raises:
        UserError: it is not there, or an mpiexec of unknown make.
    """
    if wanted == "auto" and (own := _step_launcher(scheduler)):
        return _stepping(own, f"a {schedulers()[scheduler].TITLE} job", env)
    for own in filter(None, map(_step_launcher, schedulers())):
        if own.program == wanted:
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
    if own := _step_launcher(scheduler):
        return _stepping(own, source, env)
    return _mpiexec(source, env, site_dialect)


def _step_launcher(scheduler: str) -> StepLauncher | None:
    found = schedulers().get(scheduler)
    return found.step_launcher() if found else None


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
    of_site = SITE_DIALECTS.get(site_dialect or "")
    for pattern, name, build in _BY_FIRST_LINE:
        if match := pattern.match(first):
            version = match.groupdict().get("version") or _hydra_version(version_text)
            found = Launcher("mpiexec", f"{name} {version}".strip(), program, source, build)
            if of_site and name != of_site[0]:
                return replace(found, notes=(f"{program} is {found.dialect}, and this site's is {of_site[0]}: an "
                                             "environment's own mpiexec may hide it on PATH",))
            return found
    if of_site:
        name, build = of_site
        return Launcher("mpiexec", name, program, f"{source}; the site's dialect", build)
    raise UserError(f"an mpiexec of unknown make; its version text begins {first!r}", where=program,
                    instead="put the mpiexec of MPICH, Intel MPI, Open MPI or Cray PALS first on PATH, name the "
                            "--site, or use --launcher")


def _hydra_version(text: str) -> str:
    match = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
