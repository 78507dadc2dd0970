"""Squashfs images of an environment, which nodes mount instead of unpacking an archive.

The shared file system serves few large reads instead of many small ones, and local disks hold only links. A copy
consists of links into the mounted images, except for files that contain the environment's old path, which
are copied to real folders and rewritten. The job step that runs the ranks mounts the images before Python starts,
because schedulers kill what an earlier step left behind. Sources: sqfstar(1) and mksquashfs(1) of squashfs-tools
4.5, squashfuse(1), fusermount(1).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ezpz_llm.core.base import EXIT_PREFLIGHT, SECRET_VARIABLE, UserError, parse_json
from ezpz_llm.core.base.schema import as_dataclass
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.running.staging.archive import MANIFEST, Archive
from ezpz_llm.launcher.running.staging.relocation import Manifest, path_replacer, rewrite

_DISABLE_STAGING = "remove stage = \"squashfs\" from the site file, or --stage-env"
# squashfuse must not hold the launcher's descriptors, or the launcher would wait for it. Nor may it carry the run's
# marker, or it would be taken for a process that the rank left behind.
_CLOSE_FDS = "for fd in /proc/self/fd/*; do fd=${fd##*/}; ((fd > 2)) && eval \"exec $fd>&-\"; done 2>/dev/null"
MOUNT = f"""to=$1; shift
if mkdir "$to/.lock" 2>/dev/null; then
  for ((n = 0; ; n++)); do
    image=$1; shift
    [[ $image == -- ]] && break
    if ! ({_CLOSE_FDS}; exec env -u {RUN_ID_VARIABLE} -u {SECRET_VARIABLE} squashfuse "$image" "$to/.image$n"); then
      echo "launch: $HOSTNAME cannot mount $image" >&2
      mkdir "$to/.failed"; exit {EXIT_PREFLIGHT}
    fi
  done
  mkdir "$to/.ready"
else
  while [[ $1 != -- ]]; do shift; done
  shift
  until [[ -e $to/.ready ]]; do [[ -e $to/.failed ]] && exit {EXIT_PREFLIGHT}; sleep 0.05; done
fi
exec "$@"
"""
"""Shell script: a node's first rank mounts the images `$2…` in the copy `$1`; then all run what follows `--`."""

UNMOUNT = """for mount in "$1"/.image*; do
  fusermount3 -u -z "$mount" || fusermount -u -z "$mount" || umount -l "$mount"
done 2>/dev/null
rm -rf "$1"
"""
"""Shell script that unmounts the images in the copy `$1`, if there are any, and removes the copy."""


def make_images(archives: Sequence[Archive]) -> list[Path]:
    """Return the image next to each archive; create it if it is missing.

    Raises:
        UserError: sqfstar is missing or fails.
    """
    program = shutil.which("sqfstar")
    images = [archive.path.with_suffix(".sqsh") for archive in archives]
    for archive, image in zip(archives, images, strict=True):
        if image.exists():
            continue
        if program is None:
            raise UserError("sqfstar, which is required to create squashfs images, is not on PATH",
                            where="--stage-env",
                            instead=f"load or install squashfs-tools (4.5 or newer), or {_DISABLE_STAGING}")
        part = image.with_name(f".{image.name}.{os.getpid()}")
        with open(archive.path, "rb") as tar:
            result = subprocess.run([program, "-comp", "gzip", str(part)], stdin=tar, capture_output=True,
                                    text=True, errors="replace", check=False)
        if result.returncode:
            part.unlink(missing_ok=True)
            raise UserError(f"sqfstar ended with code {result.returncode}: {result.stderr.strip()[-300:]}",
                            where=str(image), instead=_DISABLE_STAGING)
        os.replace(part, image)
    return images


def create_linked_copy(images: Sequence[str], to: Path) -> None:
    """Create the copy `to` with links into the images, which are mounted below it later.

    Raises:
        OSError, UserError: an image cannot be mounted or read on this node.
    """
    for number, image in enumerate(images):
        mount = to / f".image{number}"
        mount.mkdir()
        with _mounted(image, mount):
            text = (mount / MANIFEST).read_bytes()
            _link_entries(mount, to, as_dataclass(Manifest, parse_json(text, MANIFEST, len(text)), MANIFEST))


@contextlib.contextmanager
def _mounted(image: str, mount: Path) -> Iterator[None]:
    if shutil.which("squashfuse") is None:
        raise UserError("squashfuse, which is required to mount the image, is not on PATH on"
                        f" {socket.gethostname()}", where=image, exit_code=EXIT_PREFLIGHT,
                        instead=f"load or install squashfuse, or {_DISABLE_STAGING}")
    result = subprocess.run(["squashfuse", image, str(mount)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(result.returncode, f"squashfuse failed: {result.stderr.strip()[-300:]}", image)
    try:
        yield
    finally:
        programs = (("fusermount3", "-u", "-z"), ("fusermount", "-u", "-z"), ("umount", "-l"))
        for command in programs:
            with contextlib.suppress(OSError):
                if subprocess.run([*command, str(mount)], capture_output=True, check=False).returncode == 0:
                    break


def _link_entries(mount: Path, to: Path, manifest: Manifest) -> None:
    replace_paths: Callable[[str], str] = path_replacer(manifest.roots, to)
    rewritten = set(manifest.rewrite)
    folders = {Path("."), *(parent for name in rewritten for parent in Path(name).parents)}
    for folder in sorted(folders):
        (to / folder).mkdir(exist_ok=True)
        for entry in os.scandir(mount / folder):
            relative = folder / entry.name
            if relative in folders or str(relative) == MANIFEST:
                continue
            if str(relative) in rewritten:
                shutil.copy(entry.path, to / relative)
                rewrite(to / relative, replace_paths)
            elif entry.is_symlink():
                os.symlink(replace_paths(os.readlink(entry.path)), to / relative)
            else:
                os.symlink(entry.path, to / relative)
