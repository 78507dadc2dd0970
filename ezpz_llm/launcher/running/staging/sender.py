"""Launch side of staging: choose a method, send the archives to every node, run there, and clean up."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, cache_dir, count_noun, print_lines
from ezpz_llm.core.rundir.records import Archive as ArchiveRecord, Staging, update_record
from ezpz_llm.launcher.basics.addresses import is_local_node_among
from ezpz_llm.launcher.basics.variables import PATH_VARIABLE
from ezpz_llm.launcher.jobs.option_parsing import Options
from ezpz_llm.launcher.jobs.schedulers import scheduler_here, scheduler_of, schedulers, step_launchers
from ezpz_llm.launcher.planning.plan import LaunchPlan, Setting, prepare_step
from ezpz_llm.launcher.running.signals import INTERRUPTED
from ezpz_llm.launcher.running.staging.archive import Archive, Root, find_roots, make_archives
from ezpz_llm.launcher.running.staging.image import MOUNT, UNMOUNT, make_images
from ezpz_llm.launcher.running.staging.receiver import folder_of_copy
from ezpz_llm.launcher.running.staging.relocation import path_replacer
from ezpz_llm.launcher.running.supervision import run

_LIMIT_S = 1800.0
"""Time limit for copying."""
_RECEIVE = (sys.executable, "-m", "ezpz_llm.launcher.running.staging.receiver")


@contextlib.contextmanager
def stage_environment(plan: LaunchPlan, options: Options, env: Mapping[str, str]) -> Iterator[LaunchPlan]:
    """Yield the plan that runs from each node's copy of the environment; remove the copies at the end.

    Raises:
        UserError: a node cannot create its copy (exit code 3); all copies are removed.
    """
    began = time.monotonic()
    roots = find_roots()
    archives = make_archives(roots, cache_dir(env) / "staging")
    method = _choose_method(plan, env)
    local_dir = _local_folder(plan, env)
    print_lines(_announcement(archives, method, plan, local_dir), file=sys.stderr)
    prefix = f"{local_dir}/ezpz_llm-{os.getuid()}-{plan.run_id}-"
    if method == "sbcast":
        first = _step(plan, options, (*_RECEIVE, "make", prefix, str(sum(archive.bytes for archive in archives))),
                      "make")
    else:
        paths = _image_paths(archives) if method == "squashfs" else [str(archive.path) for archive in archives]
        first = _step(plan, options, (*_RECEIVE, method, prefix, *paths), "copy")
    # The folder's name is derived from a secret. With only the run id, which is in run.json, another user could
    # create the folder first.
    folder = folder_of_copy(prefix, {name: setting.value for name, setting in first.env.items()})
    try:
        _run(first)
        if method == "sbcast":
            _send(plan, options, archives, folder)
        seconds = time.monotonic() - began
        print_lines(f"staged     in {seconds:.1f} s", file=sys.stderr)
        update_record(plan.run_dir, staging=Staging(
            folder=str(folder), way=method, seconds=round(seconds, 3), archives=[
                ArchiveRecord(path=str(archive.path), files=archive.files, bytes=archive.bytes,
                              is_new=archive.is_new) for archive in archives]))
        relocated_plan = _relocate(plan, roots, folder, env)
        if method == "squashfs":
            relocated_plan = _with_mount(relocated_plan, folder, _image_paths(archives))
        yield relocated_plan
    finally:
        run(_step(plan, options, ("bash", "-c", UNMOUNT, "unmount", str(folder)), "remove"), None, _LIMIT_S)


def _choose_method(plan: LaunchPlan, env: Mapping[str, str]) -> str:
    """Choose how the nodes get the archives.

    On a single node: squashfs if the site sets it, else "file", by which each node reads the archives itself. On
    several nodes: the site's setting, else sbcast if the scheduler has it, else MPI if mpi4py is installed and
    mpiexec or srun starts the ranks, else "file".
    """
    if len(plan.hosts) == 1 and plan.site.stage != "squashfs":
        return "file"
    if plan.site.stage:
        return plan.site.stage
    scheduler = scheduler_of(plan.allocation)
    if scheduler and scheduler.COPIER and shutil.which(scheduler.COPIER, path=env.get("PATH")):
        return "sbcast"
    has_mpi = plan.launcher.dialect.runs_mpi and importlib.util.find_spec("mpi4py") is not None
    return "mpi" if has_mpi else "file"


def _local_folder(plan: LaunchPlan, env: Mapping[str, str]) -> Path:
    """Return the folder on each node's local disk: the job's own, such as SLURM_TMPDIR, else /local, else /tmp."""
    if folder := next(filter(None, (scheduler.local_folder(env) for scheduler in schedulers().values())), None):
        return folder
    # The nodes of an allocation are assumed to be alike; a login node may differ.
    is_node = is_local_node_among(plan.hosts)
    return Path("/local") if is_node and os.access("/local", os.W_OK | os.X_OK) else Path("/tmp")


def _announcement(archives: Sequence[Archive], method: str, plan: LaunchPlan, local_dir: Path) -> str:
    files, size = sum(archive.files for archive in archives), sum(archive.bytes for archive in archives)
    origin = "new archive" if any(archive.is_new for archive in archives) else "cached archive"
    return (f"staging    {files} files, {size / 1e6:.0f} MB ({origin}) to {local_dir} on"
            f" {count_noun(len(plan.hosts), 'node')} by {method}")


def _send(plan: LaunchPlan, options: Options, archives: Sequence[Archive], folder: Path) -> None:
    """Send the archives to the copy's folder by sbcast, and unpack them there.

    The folder is private. In a shared folder, sbcast could follow a symbolic link that another user created.
    """
    paths = [f"{folder}/.{number}.tar" for number, _ in enumerate(archives)]
    for archive, path in zip(archives, paths, strict=True):
        if not _send_archive(plan, archive.path, path):
            raise _not_staged(EXIT_PREFLIGHT)
    _run(_step(plan, options, (*_RECEIVE, "sbcast", str(folder), *paths), "copy"))


def _image_paths(archives: Sequence[Archive]) -> list[str]:
    return [str(image) for image in make_images(archives)]


def _with_mount(plan: LaunchPlan, folder: Path, images: Sequence[str]) -> LaunchPlan:
    """Return the plan with a command that mounts the images before the first program that is in the copy."""
    first = next(position for position, word in enumerate(plan.argv) if word.startswith(f"{folder}/"))
    mount = ("bash", "-c", MOUNT, "mount", str(folder), *images, "--")
    return plan._replace(argv=(*plan.argv[:first], *mount, *plan.argv[first:]))


def _not_staged(code: int) -> UserError:
    return UserError("the environment could not be copied to every node (see above); no rank was started",
                     where="--stage-env", exit_code=code,
                     instead="fix the cause (such as a full local disk), or omit --stage-env")


def _send_archive(plan: LaunchPlan, source: Path, target: str) -> bool:
    # stage = "sbcast" in the site file also works with --scheduler none inside a job.
    scheduler = scheduler_of(plan.allocation) or scheduler_here(os.environ)
    return scheduler is not None and scheduler.copy_to_nodes(source, target)


def _step(plan: LaunchPlan, options: Options, command: tuple[str, ...], name: str) -> LaunchPlan:
    """Return a plan that runs `command` once on each node with the same launcher."""
    return prepare_step(options, command=command, ranks=None, per_host=1, nodes=None, hostfile=None, tee="none",
                        hosts=",".join(plan.hosts), run_dir=plan.run_dir.path / "staging" / name)


def _run(step: LaunchPlan) -> None:
    if code := run(step, None, _LIMIT_S).code:
        raise _not_staged(code if code in INTERRUPTED else EXIT_PREFLIGHT)


_RELOCATED_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME")


def _relocate(plan: LaunchPlan, roots: Sequence[Root], to: Path, env: Mapping[str, str]) -> LaunchPlan:
    """Return `plan` with the Python, programs and variables of the copy in `to`.

    The launcher is not replaced, because it runs on this node, which may not have a copy. The user's arguments are
    not replaced either, except for a command that is a program of the environment.
    """
    replace_paths = path_replacer({str(root.path): root.name for root in roots}, to)
    programs = os.path.join(sys.prefix, "bin")

    def relocate_program(word: str) -> str:
        return replace_paths(word) if os.path.dirname(word) == programs else word

    split = len(plan.argv) - len(plan.command)
    prefix, command = plan.argv[:split], plan.argv[split:]
    is_launcher = os.path.basename(prefix[0]) in ("mpiexec", *step_launchers())
    first = prefix[0] if is_launcher else relocate_program(prefix[0])
    argv = (first, *map(relocate_program, prefix[1:]), relocate_program(command[0]), *command[1:])
    now = {**env, **{name: setting.value for name, setting in plan.env.items()}}
    changed = {name: replace_paths(now[name]) for name in _RELOCATED_VARIABLES if now.get(name)}
    path = now.get("PATH", os.defpath)
    if programs in path.split(os.pathsep):
        # Prepend the copy's bin and keep the original PATH, on which the launcher finds its own helpers.
        changed["PATH"] = os.pathsep.join([replace_paths(programs), path])
        if PATH_VARIABLE in now:
            changed[PATH_VARIABLE] = changed["PATH"]
    settings = {name: Setting(value, "--stage-env") for name, value in changed.items() if value != now.get(name)}
    return plan._replace(argv=argv, env={**plan.env, **settings})
