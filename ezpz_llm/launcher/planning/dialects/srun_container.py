"""Containers that srun itself starts, for the whole step.

Sources: https://github.com/NVIDIA/pyxis/blob/107519944221822ea1dace4db8e7234b2eaa4cd5/README.md; Alps' Container
Engine: https://confluence.cscs.ch/display/KB/Container+Engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ezpz_llm.core.base import UserError, ask_command

IMAGE_OPTIONS = {"pyxis": "--container-image", "environment": "--environment"}
"""Runtimes of srun, with its option for the image: NVIDIA's Pyxis, and the Container Engine of Alps."""

_HELP_TIMEOUT_S = 5.0


def step_options(runtime: str, image: str, launcher: str, run_dir: Path, variables: Iterable[str], source: str,
                 env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options with which srun runs the step in a container.

    Args:
        runtime: one of `IMAGE_OPTIONS`.
        launcher: kind of the launcher that starts the ranks.
        variables: names of variables that must keep launch's values.
        source: the option or site file that names the image.

    Raises:
        UserError: another launcher starts the ranks, srun lacks the runtime's plug-in, or a folder cannot be
            mounted.
    """
    option = IMAGE_OPTIONS[runtime]
    if launcher != "srun":
        raise UserError(f"{option} is an option of srun, but {launcher} starts the ranks", where=source,
                        instead="--launcher srun in a Slurm job, another runtime in the site file, or --container"
                                " none")
    srun_help = ask_command(("srun", "--help"), env, _HELP_TIMEOUT_S).text
    if srun_help is not None and option not in srun_help:
        raise UserError(f"this srun has no option {option}, which runtime \"{runtime}\" requires", where=source,
                        instead="another runtime in the site file, or --container none")
    if runtime != "pyxis":
        return (f"{option}={image}",)
    folders = check_mounts((str(run_dir), os.getcwd()), ":,", source)
    # Variables that the image sets would otherwise keep the image's values.
    return (f"{option}={image}", f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)}",
            f"--container-workdir={os.getcwd()}", f"--container-env={','.join(sorted(variables))}")


def check_mounts(folders: Iterable[str], separators: str, source: str) -> tuple[str, ...]:
    """Return the distinct folders, which can be mounted in a container.

    Args:
        separators: characters that separate paths in the runtime's option, which has no escape for them.

    Raises:
        UserError: a folder contains a separator.
    """
    for folder in folders:
        if found := next((character for character in separators if character in folder), None):
            raise UserError(f"the container cannot mount {folder}, because {found!r} separates its paths",
                            where=source, instead=f"a run directory and a working directory without {found!r}, or"
                                                  " --container none")
    return tuple(dict.fromkeys(folders))
