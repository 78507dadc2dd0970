"""A host's part in staging: one process a host receives the archives and unpacks them on the host's own disk.

`python3 -m ezpz_llm.launch.staging.receive WAY BEGIN ARCHIVE…`, started by launch. WAY says how the archives come:
`file` (they can be read here), `mpi` (rank 0 reads them, and broadcasts them) or `squashfs` (they are images, which
are only mounted). The copy is a new folder whose name begins so and ends with a word that follows from the step's
secret: other users see what is on a command line, and could make it first. sbcast needs a folder that is there
already: `make BEGIN BYTES` makes it, if there is room for so much, and `sbcast FOLDER ARCHIVE…` unpacks into it the
archives that lie there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ezpz_llm.base import (
    EXIT_PREFLIGHT,
    SECRET_VARIABLE,
    NotPrivate,
    UserError,
    as_dataclass,
    derived,
    parse_json,
    run_command,
    run_secret,
)
from ezpz_llm.launch.node.processes import marked
from ezpz_llm.launch.staging.archive import MANIFEST
from ezpz_llm.launch.variables import WORLD_SIZE_VARIABLE

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 16 << 20
_STALE_S = 3600


def main(argv: Sequence[str]) -> int:
    """Unpack the archives into the new folder TO; leave nothing behind where that fails.

    Raises:
        UserError: what failed, and on which host.
    """
    way, to, *archives = argv
    open_archive = _over_mpi() if way == "mpi" else _as_sent if way == "sbcast" else _as_it_lies
    folder = Path(to) if way == "sbcast" else copy_of(to, os.environ)
    remove_stale(folder)
    try:
        if way == "make":
            _check_room(folder.parent, int(archives[0]))
        if way != "sbcast":
            # What may be there is not ours.
            folder.mkdir(mode=0o700)
        if way == "make":
            return 0
        if way == "squashfs":
            from ezpz_llm.launch.staging.image import graft

            graft(archives, folder)
            return 0
        for archive in archives:
            with open_archive(archive) as source:
                unpack(source, folder)
            if way == "sbcast":
                os.unlink(archive)
        if way == "mpi":
            _finalize()
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (OSError, tarfile.TarError) as error:
        if not isinstance(error, FileExistsError):
            shutil.rmtree(folder, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{socket.gethostname()} cannot take its copy of the environment: {why}",
                        where=getattr(error, "filename", None) or to, exit_code=EXIT_PREFLIGHT,
                        instead="make room there, or leave --stage-env out") from error
    return 0


def copy_of(begin: str, env: Mapping[str, str]) -> Path:
    """The copy's folder, by the step's secret."""
    secret = run_secret(env)
    if secret is None:
        raise UserError(f"the launcher did not hand {SECRET_VARIABLE} on", where=socket.gethostname(),
                        exit_code=EXIT_PREFLIGHT)
    return Path(begin + derived(secret, "staging")[:16])


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{socket.gethostname()} has no room for a copy of the environment, which takes"
                        f" {needed / 1e6:.0f} MB: {free / 1e6:.0f} MB are free", where=str(folder),
                        exit_code=EXIT_PREFLIGHT)


def remove_stale(folder: Path) -> None:
    """Remove copies beside `folder` whose launch was killed and could not: an hour old, and without processes."""
    begin = "-".join(folder.name.split("-")[:2])
    for other in folder.parent.glob(f"{begin}-*"):
        try:
            is_old = time.time() - other.lstat().st_mtime > _STALE_S and other.lstat().st_uid == os.getuid()
            if is_old and not any(marked(re.split("[-.]", other.name)[2])):
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        except OSError:
            # Another host's process on the same disk may have removed it.
            continue


@dataclass(frozen=True)
class Manifest:
    """What an archive says of itself: the copies' names by the folders they were made of, and the files that name
    these folders."""

    roots: dict[str, str]
    rewrite: tuple[str, ...]


def unpack(source: BinaryIO, to: Path) -> None:
    """Unpack one archive below `to`; links and files that name the environment's old folders name the new ones.

    Raises:
        OSError, tarfile.TarError: it cannot be read or written.
    """
    with tarfile.open(fileobj=source, mode="r|") as tar:
        first = tar.next()
        beginning = tar.extractfile(first) if first is not None and first.name == MANIFEST else None
        text = beginning.read() if beginning else b""
        if not text:
            raise tarfile.ReadError(f"no {MANIFEST} at its beginning")
        manifest = as_dataclass(Manifest, parse_json(text, MANIFEST, len(text)), MANIFEST)
        moved = mover(manifest.roots, to)
        # Our own archive, from our own cache, is taken as it is.
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        while (member := tar.next()) is not None:
            if member.issym():
                member.linkname = moved(member.linkname)
            elif member.isdir():
                # Nothing could be put into a folder that is read-only.
                member.mode |= 0o700
            tar.extract(member, to)
    for name in manifest.rewrite:
        rewrite(to / name, moved)


def mover(roots: dict[str, str], to: Path) -> Callable[[str], str]:
    """A function that replaces in a text every mention of a root's folder by that of its copy."""
    # The longest first: one environment may lie inside another's folder.
    paths = sorted(roots, key=len, reverse=True)
    mention = re.compile("(?<![\\w.-])(" + "|".join(map(re.escape, paths)) + ")(?![\\w.-])")
    return lambda text: mention.sub(lambda match: str(to / roots[match[1]]), text)


def rewrite(path: Path, moved: Callable[[str], str]) -> None:
    """Let a file name the new folders."""
    old = path.read_text(errors="surrogateescape")
    if (new := moved(old)) != old:
        path.chmod(path.stat().st_mode | 0o200)
        path.write_text(new, errors="surrogateescape")


def _as_it_lies(path: str) -> BinaryIO:
    return open(path, "rb")


@contextlib.contextmanager
def _as_sent(path: str) -> Iterator[BinaryIO]:
    """What sbcast put into a folder where others write, too: only a file of ours."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise NotPrivate("it belongs to another user", path)
        yield file


def _over_mpi() -> Callable[[str], contextlib.AbstractContextManager[BinaryIO]]:
    import mpi4py

    # A host that cannot take its copy ends at once: MPI_Finalize would wait for those that still broadcast.
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    world, promised = MPI.COMM_WORLD, int(os.environ[WORLD_SIZE_VARIABLE])
    if world.size != promised:
        raise UserError(f"{promised} processes were started, but MPI on {socket.gethostname()} knows {world.size}",
                        where="mpi4py", exit_code=EXIT_PREFLIGHT,
                        instead="use the mpiexec (or srun --mpi plug-in) that mpi4py's MPI library belongs to")

    @contextlib.contextmanager
    def open_archive(path: str) -> Iterator[BinaryIO]:
        """An archive that rank 0 can read, on every rank."""
        if world.rank == 0:
            with open(path, "rb") as file:
                yield io.BufferedReader(_Broadcast(world, file), CHUNK_BYTES)
        else:
            yield io.BufferedReader(_Broadcast(world, None), CHUNK_BYTES)

    return open_archive


def _finalize() -> None:
    from mpi4py import MPI

    MPI.Finalize()


class _Broadcast(io.RawIOBase):
    """A stream that is the same on every rank: what rank 0 reads from its file."""

    def __init__(self, world: MPI.Intracomm, file: io.BufferedIOBase | None) -> None:
        self._world = world
        self._file = file
        self._chunk = bytearray(CHUNK_BYTES)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what rank 0 reads next."""
        if not self._left:
            size = self._file.readinto(self._chunk) if self._file else 0
            size = self._world.bcast(size)
            view = memoryview(self._chunk)[:size]
            if size:
                self._world.Bcast(view)
            self._left = view
        taken = min(len(buffer), len(self._left))
        buffer[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        return taken


if __name__ == "__main__":
    sys.exit(run_command(main))
