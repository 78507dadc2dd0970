"""Node side of staging: one process per node receives the archives and unpacks them on the local disk.

`python3 -m ezpz_llm.launcher.running.staging.receiver METHOD PREFIX ARCHIVE…`, started by launch. METHOD is `file`
(every node reads the archives), `mpi` (rank 0 reads and broadcasts them) or `squashfs` (images, which are only
mounted).

The copy is a new folder whose path starts with PREFIX and ends with a word derived from the step's secret: other
users can read command lines, and could create a folder with a known name first. sbcast requires an existing folder:
`make PREFIX BYTES` creates it, if there is enough space, and `sbcast FOLDER ARCHIVE…` unpacks the archives in it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ezpz_llm.core.base import (
    EXIT_PREFLIGHT,
    SECRET_VARIABLE,
    NotPrivate,
    UserError,
    as_dataclass,
    derive_key,
    parse_json,
    run_command,
    run_secret,
)
from ezpz_llm.launcher.basics.processes import marked_processes
from ezpz_llm.launcher.basics.variables import WORLD_SIZE_VARIABLE
from ezpz_llm.launcher.running.staging.archive import MANIFEST
from ezpz_llm.launcher.running.staging.relocation import Manifest, path_replacer, rewrite

if TYPE_CHECKING:
    from mpi4py import MPI

_CHUNK_BYTES = 16 << 20
_STALE_S = 3600


def main(argv: Sequence[str]) -> int:
    """Create this node's copy of the environment; remove it if that fails.

    Raises:
        UserError: the copy failed; names the node and the reason.
    """
    method, to, *archives = argv
    open_archive = _mpi_opener() if method == "mpi" else _open_sent_file if method == "sbcast" else _open_file
    folder = Path(to) if method == "sbcast" else folder_of_copy(to, os.environ)
    remove_stale(folder)
    try:
        if method == "make":
            _check_space(folder.parent, int(archives[0]))
        if method != "sbcast":
            # Fails if the folder exists: it could belong to another user.
            folder.mkdir(mode=0o700)
        if method == "make":
            return 0
        if method == "squashfs":
            from ezpz_llm.launcher.running.staging.image import create_linked_copy

            create_linked_copy(archives, folder)
            return 0
        for archive in archives:
            with open_archive(archive) as source:
                unpack(source, folder)
            if method == "sbcast":
                os.unlink(archive)
        if method == "mpi":
            _finalize()
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (OSError, tarfile.TarError) as error:
        if not isinstance(error, FileExistsError):
            shutil.rmtree(folder, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{socket.gethostname()} cannot create its copy of the environment: {reason}",
                        where=getattr(error, "filename", None) or to, exit_code=EXIT_PREFLIGHT,
                        instead=_remedy(error)) from error
    return 0


def _remedy(error: OSError | tarfile.TarError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, or omit --stage-env"
    if number == errno.EEXIST:
        return "start again if the folder is local to the node, or omit --stage-env if nodes share it"
    return "fix that on the node, or omit --stage-env"


def folder_of_copy(prefix: str, env: Mapping[str, str]) -> Path:
    """Return the copy's folder, derived from the step's secret."""
    secret = run_secret(env)
    if secret is None:
        raise UserError(f"the launcher did not pass {SECRET_VARIABLE} to the ranks", where=socket.gethostname(),
                        exit_code=EXIT_PREFLIGHT)
    return Path(prefix + derive_key(secret, "staging")[:16])


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{socket.gethostname()} has too little space for a copy of the environment:"
                        f" {needed / 1e6:.0f} MB required, {free / 1e6:.0f} MB free", where=str(folder),
                        exit_code=EXIT_PREFLIGHT)


def remove_stale(folder: Path) -> None:
    """Remove copies next to `folder` that a killed launch left: at least an hour old, and without processes."""
    begin = "-".join(folder.name.split("-")[:2])
    for other in folder.parent.glob(f"{begin}-*"):
        try:
            is_old = time.time() - other.lstat().st_mtime > _STALE_S and other.lstat().st_uid == os.getuid()
            if is_old and not any(marked_processes(re.split("[-.]", other.name)[2])):
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        except OSError:
            # The process of another node may have removed it, if the disk is shared.
            continue


def unpack(source: BinaryIO, to: Path) -> None:
    """Unpack one archive below `to`, and replace the environment's old paths in links and files.

    Raises:
        OSError, tarfile.TarError: the archive cannot be read, or the copy cannot be written.
    """
    with tarfile.open(fileobj=source, mode="r|") as tar:
        first = tar.next()
        manifest_file = tar.extractfile(first) if first is not None and first.name == MANIFEST else None
        text = manifest_file.read() if manifest_file else b""
        if not text:
            raise tarfile.ReadError(f"the archive does not start with {MANIFEST}")
        manifest = as_dataclass(Manifest, parse_json(text, MANIFEST, len(text)), MANIFEST)
        replace_paths = path_replacer(manifest.roots, to)
        # No filter is needed: launch created the archive.
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        while (member := tar.next()) is not None:
            if member.issym():
                member.linkname = replace_paths(member.linkname)
            elif member.isdir():
                # Files cannot be created in a read-only folder.
                member.mode |= 0o700
            tar.extract(member, to)
    for name in manifest.rewrite:
        rewrite(to / name, replace_paths)


def _open_file(path: str) -> BinaryIO:
    return open(path, "rb")


@contextlib.contextmanager
def _open_sent_file(path: str) -> Iterator[BinaryIO]:
    """Open a file sent by sbcast, if it belongs to this user."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise NotPrivate("it belongs to another user", path)
        yield file


def _mpi_opener() -> Callable[[str], contextlib.AbstractContextManager[BinaryIO]]:
    import mpi4py

    # A node that fails must exit at once, but MPI_Finalize would wait for the nodes that still broadcast.
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    world, planned = MPI.COMM_WORLD, int(os.environ[WORLD_SIZE_VARIABLE])
    if world.size != planned:
        raise UserError(f"launch started {planned} processes, but MPI on {socket.gethostname()} has {world.size}",
                        where="mpi4py", exit_code=EXIT_PREFLIGHT,
                        instead="use the mpiexec (or srun --mpi plug-in) that mpi4py's MPI library belongs to")

    @contextlib.contextmanager
    def open_archive(path: str) -> Iterator[BinaryIO]:
        """Open, on every rank, an archive that only rank 0 needs to read."""
        if world.rank == 0:
            with open(path, "rb") as file:
                yield io.BufferedReader(_Broadcast(world, file), _CHUNK_BYTES)
        else:
            yield io.BufferedReader(_Broadcast(world, None), _CHUNK_BYTES)

    return open_archive


def _finalize() -> None:
    from mpi4py import MPI

    MPI.Finalize()


class _Broadcast(io.RawIOBase):
    """Stream that broadcasts rank 0's file to every rank."""

    def __init__(self, world: MPI.Intracomm, file: io.BufferedIOBase | None) -> None:
        self._world = world
        self._file = file
        self._chunk = bytearray(_CHUNK_BYTES)
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes of rank 0's file."""
        if not self._unread:
            size = self._file.readinto(self._chunk) if self._file else 0
            size = self._world.bcast(size)
            view = memoryview(self._chunk)[:size]
            if size:
                self._world.Bcast(view)
            self._unread = view
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count


if __name__ == "__main__":
    sys.exit(run_command(main))
