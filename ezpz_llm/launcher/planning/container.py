"""Containers for ranks, started by a command prefix on each rank, or by srun options for the whole step.

Sources: https://apptainer.org/docs/user/main/cli/apptainer_exec.html (Singularity's commands are the same);
https://github.com/NERSC/shifter; https://github.com/NERSC/podman-hpc, with podman-run(1).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.launcher.basics.devices import gpu_driver
from ezpz_llm.launcher.planning.dialects.srun_container import IMAGE_OPTIONS, check_mounts, step_options
from ezpz_llm.launcher.planning.sites import ANY_RUNTIME, Site

_GPU_OPTIONS = frozenset(("--nv", "--nvccli", "--rocm"))
_IMAGE_SUFFIXES = (".sif", ".sqsh", ".squashfs", ".img")


class RankContainer(NamedTuple):
    """Container of the ranks, and the arguments that start it.

    Args:
        image: file or name of the image; empty if no container is used.
        runtime: one of `sites.RUNTIMES`.
        source: the option or site file that names the image.
        words: prefix of the command on each rank.
        step_options: options of srun that run the whole step in the container, including the rank shim.
    """

    image: str = ""
    runtime: str = ""
    source: str = ""
    words: tuple[str, ...] = ()
    step_options: tuple[str, ...] = ()


def choose_container(wanted: str | None, site: Site, launcher: str, run_dir: Path, variables: Iterable[str],
                     env: Mapping[str, str]) -> RankContainer:
    """Return the container of the ranks, with the run directory and the working directory mounted in it.

    Args:
        wanted: value of --container; "none" for no container, None for the container in the site's `[job]`.
        variables: names of the variables that launch sets; a container's own values must not replace them.

    Raises:
        UserError: the runtime or the image is missing, the runtime requires another launcher or an option that srun
            lacks, or the run directory cannot be mounted.
    """
    site_container = site.job.container
    image = wanted or site_container.image
    if not image or image == "none":
        return RankContainer()
    source = "--container" if wanted else f"[job] container of site {site.name}"
    image = _resolve_image(image, source)
    runtime = site_container.runtime or next((name for name in ANY_RUNTIME if _is_on_path(name, env)),
                                             ANY_RUNTIME[0])
    if runtime in IMAGE_OPTIONS:
        options = step_options(runtime, image, launcher, run_dir, variables, source, env)
        return RankContainer(image, runtime, source, step_options=(*options, *site_container.options))
    if not _is_on_path(runtime, env):
        raise UserError(f"{runtime}, which is required to run {image}, is not on PATH", where=source,
                        instead="load its module, name another runtime in the site file, or pass --container none")
    return RankContainer(image, runtime, source,
                         words=_command_prefix(runtime, image, run_dir, site_container.options, source))


def _is_on_path(program: str, env: Mapping[str, str]) -> bool:
    return shutil.which(program, path=env.get("PATH", os.defpath)) is not None


def _resolve_image(image: str, source: str) -> str:
    if "://" in image or not (image.startswith(("/", "./", "~")) or image.endswith(_IMAGE_SUFFIXES)):
        return image
    path = user_path(image).absolute()
    if not path.exists():
        raise UserError(f"the image {path} does not exist", where=source,
                        instead="the path of an image on a file system that all nodes share")
    return str(path)


def _command_prefix(runtime: str, image: str, run_dir: Path, options: tuple[str, ...],
                    source: str) -> tuple[str, ...]:
    if runtime == "shifter":
        # shifter mounts the site's file systems by default.
        return (runtime, f"--image={image}", *options)
    if runtime == "podman-hpc":
        folders = check_mounts((str(run_dir), os.getcwd()), ":", source)
        return (runtime, "run", "--rm", "--env-host", "--network=host", "--ipc=host",
                *(f"--volume={folder}:{folder}" for folder in folders), f"--workdir={os.getcwd()}", *options, image)
    # Apptainer mounts the working directory, the home directory and /tmp by default, and keeps the environment.
    gpu = () if _GPU_OPTIONS.intersection(options) else _gpu_option()
    return (runtime, "exec", "--bind", *check_mounts((str(run_dir),), ":,", source), *gpu, *options, image)


def _gpu_option() -> tuple[str, ...]:
    """Return Apptainer's option that gives the container the GPUs of this node, if any."""
    vendor = gpu_driver()
    return () if vendor is None else ("--nv",) if vendor == "NVIDIA" else ("--rocm",)
