"""Containers that ranks run in: words before each rank's command, or options of srun for the whole step.

Sources: https://apptainer.org/docs/user/main/cli/apptainer_exec.html (Singularity's words are the same);
https://github.com/NERSC/shifter; https://github.com/NERSC/podman-hpc, with podman-run(1);
https://github.com/NVIDIA/pyxis/blob/107519944221822ea1dace4db8e7234b2eaa4cd5/README.md; Alps' Container Engine:
https://confluence.cscs.ch/display/KB/Container+Engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import UserError, ask_command, user_path
from ezpz_llm.launch.sites import ANY_RUNTIME, OF_SRUN, Site

_ASK_S = 5.0
_AN_IMAGE_FILE = (".sif", ".sqsh", ".squashfs", ".img")


@dataclass(frozen=True)
class Inside:
    """How ranks get into their container.

    Args:
        image: its file or name; empty where ranks run in none.
        runtime: one of `sites.RUNTIMES`.
        source: who named the image.
        words: stand before the command on each rank.
        srun: options of srun, by which all of the step is inside, the rank shim too.
    """

    image: str = ""
    runtime: str = ""
    source: str = ""
    words: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()


def enter(wanted: str | None, site: Site, launcher: str, run_dir: Path, variables: Iterable[str],
          env: Mapping[str, str]) -> Inside:
    """The container of --container (`wanted`; "none" for none), else of the site's `[job]`, of ranks that
    `launcher` starts: they see the run directory and the working directory, and get launch's own `variables`.

    Raises:
        UserError: the runtime or the image is not there, or srun alone could start ranks in it.
    """
    asked = site.job.container
    image = wanted or asked.image
    if not image or image == "none":
        return Inside()
    source = "--container" if wanted else f"[job] container of site {site.name}"
    image = _image(image, source)
    runtime = asked.runtime or next((one for one in ANY_RUNTIME if _is_here(one, env)), ANY_RUNTIME[0])
    if runtime in OF_SRUN:
        words = _of_srun(runtime, image, launcher, run_dir, variables, source, env)
        return Inside(image, runtime, source, srun=(*words, *asked.options))
    if not _is_here(runtime, env):
        raise UserError(f"{runtime} is not on PATH, and ranks are to run in {image}", where=source,
                        instead="load its module, name another runtime in the site file, or --container none")
    return Inside(image, runtime, source, words=_words(runtime, image, run_dir, asked.options))


def _is_here(program: str, env: Mapping[str, str]) -> bool:
    return shutil.which(program, path=env.get("PATH", os.defpath)) is not None


def _image(image: str, source: str) -> str:
    if "://" in image or not (image.startswith(("/", "./", "~")) or image.endswith(_AN_IMAGE_FILE)):
        return image
    path = user_path(image).absolute()
    if not path.exists():
        raise UserError(f"there is no image {path}", where=source,
                        instead="the path of an image that all hosts share")
    return str(path)


def _words(runtime: str, image: str, run_dir: Path, options: tuple[str, ...]) -> tuple[str, ...]:
    if runtime == "shifter":
        # It shows the site's own file systems by itself.
        return (runtime, f"--image={image}", *options)
    if runtime == "podman-hpc":
        folders = dict.fromkeys((str(run_dir), os.getcwd()))
        return (runtime, "run", "--rm", "--env-host", "--network=host", "--ipc=host",
                *(f"--volume={folder}:{folder}" for folder in folders), f"--workdir={os.getcwd()}", *options, image)
    # The working directory, the home and /tmp are there by default, and so is the environment.
    return (runtime, "exec", "--bind", str(run_dir), *options, image)


def _of_srun(runtime: str, image: str, launcher: str, run_dir: Path, variables: Iterable[str], source: str,
             env: Mapping[str, str]) -> tuple[str, ...]:
    option = OF_SRUN[runtime]
    if launcher != "srun":
        raise UserError(f"{option} is an option of srun, and {launcher} starts these ranks", where=source,
                        instead="--launcher srun in a Slurm job, another runtime in the site file, or --container"
                                " none")
    said = ask_command(("srun", "--help"), env, _ASK_S).text
    if said is not None and option not in said:
        raise UserError(f"this srun has no {option}, which runtime \"{runtime}\" needs", where=source,
                        instead="another runtime in the site file, or --container none")
    if runtime != "pyxis":
        return (f"{option}={image}",)
    folders = dict.fromkeys((str(run_dir), os.getcwd()))
    # Variables that an image has too would keep the image's values.
    return (f"{option}={image}", f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)}",
            f"--container-workdir={os.getcwd()}", f"--container-env={','.join(sorted(variables))}")
