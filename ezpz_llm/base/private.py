"""Private folders, records in them, and the run's secret, in places where other users can write too (/dev/shm).

A folder is made with mode 0700, opened without following a link, and checked by its descriptor; all work in it goes
through that descriptor. What another user did to the path before or does to it later changes nothing: the work is
done in a folder of our own, or refused. Files in it are opened without following links and have to be ours, too, as
a folder may once have been open to others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import MOST_BYTES, open_regular, parse_json
from ezpz_llm.base.schema import as_dataclass

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Nothing waits for the other end of a FIFO."""
_MOST_BYTES = 1 << 24
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NotPrivate(PermissionError):
    """A folder or file that belongs to somebody else, or that others can write to. `strerror` says which."""

    def __init__(self, why: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, why, str(path))


class PrivateFolder:
    """An open private folder: see `make_private` and `open_private`. Names are plain, without a slash.

    Every method raises OSError where the file system refuses, and NotPrivate for a file that is not ours alone.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    def read(self, name: str, most: int = _MOST_BYTES) -> bytes:
        """Return the content of a file, up to `most` bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(most)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file in one step: a reader sees the old one or the new one, never a part."""
        beside = f".{_plain(name)}.{os.urandom(6).hex()}"
        try:
            self.create(beside, data)
            os.replace(beside, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError as error:
            self.remove(beside)
            # A full disk names no file.
            error.filename = str(self.path / name)
            raise
        except BaseException:
            self.remove(beside)
            raise

    def create(self, name: str, data: bytes = b"") -> None:
        """Make a file that is not there yet.

        Raises:
            FileExistsError: it is.
        """
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a file in place, which costs a file system half of what `write` does; a reader may see a part."""
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(data)
            file.truncate()

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a plain file or a FIFO of ours; a new one has mode 0600."""
        # What is not ours must not be cut short before that is known.
        assert not flags & os.O_TRUNC
        handle = os.open(_plain(name), flags | _FLAGS, 0o600, dir_fd=self._handle)
        try:
            found = os.fstat(handle)
            if found.st_uid != os.geteuid():
                raise NotPrivate(f"it belongs to another user (uid {found.st_uid})", self.path / name)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
                raise NotPrivate("it is no plain file", self.path / name)
            if found.st_nlink > 1:
                # Whoever could write here may have linked another file of ours to this name.
                raise NotPrivate("it has a second name elsewhere (a hard link)", self.path / name)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def make_fifo(self, name: str) -> None:
        """Make a FIFO, if nothing of that name is there."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(_plain(name), 0o600, dir_fd=self._handle)

    def stat(self, name: str) -> os.stat_result:
        """The status of a file, not of what a link names.

        Raises:
            NotPrivate: it is not ours.
        """
        found = os.stat(_plain(name), dir_fd=self._handle, follow_symlinks=False)
        if found.st_uid != os.geteuid():
            raise NotPrivate(f"it belongs to another user (uid {found.st_uid})", self.path / name)
        return found

    def touch(self, name: str) -> None:
        """Set a file's time to now; make it if it is not there."""
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            os.utime(file.fileno())

    def has(self, name: str) -> bool:
        """Is there a file of ours with that name?"""
        try:
            self.stat(name)
        except OSError:
            return False
        return True

    def names(self, begin: str = "") -> list[str]:
        """The sorted names of all that is in it and begins so, but for files that are just being written."""
        return sorted(name for name in os.listdir(self._handle)
                      if name.startswith(begin) and (begin or not name.startswith(".")))

    def remove(self, name: str) -> None:
        """Remove a file or a link, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_plain(name), dir_fd=self._handle)

    def close(self) -> None:
        """Let go of the folder, which stays."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def make_private(path: Path) -> PrivateFolder:
    """Make the folder if it is not there, whatever the umask, and open it. One of ours that was open to others is
    closed to them, and what they put there is set aside.

    Raises:
        NotPrivate: something of another user has that name, or the file system keeps no modes.
        OSError: it cannot be made; a link or a file has that name.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    handle = _open(path)
    try:
        _check(handle, path, 0)
        mode = os.fstat(handle).st_mode
        if mode & 0o777 != 0o700:
            os.fchmod(handle, 0o700)
        _check(handle, path, _OTHERS)
        if mode & _OTHERS_WRITE:
            _set_aside_what_is_not_ours(handle)
    except BaseException:
        os.close(handle)
        raise
    return PrivateFolder(path, handle)


def open_private(path: Path) -> PrivateFolder:
    """Open a folder that is there, and change nothing.

    Raises:
        NotPrivate: it is not ours, or others can write to it.
        OSError: there is none; a link or a file has that name.
    """
    handle = _open(path)
    try:
        _check(handle, path, _OTHERS_WRITE)
    except BaseException:
        os.close(handle)
        raise
    return PrivateFolder(path, handle)


def remove_private(path: Path) -> None:
    """Remove a folder of ours with all that is in it; leave anybody else's, and whatever cannot be removed."""
    with contextlib.suppress(OSError), open_private(path):
        # Imported here: every rank's shim imports this module, and few remove anything.
        import shutil

        # It follows no links; nobody else can put anything into a folder that is private.
        shutil.rmtree(path, ignore_errors=True)


def is_out_of_reach(parent: Path) -> bool:
    """Can nobody but root and us rename or replace what we make in `parent`, so that its path can be handed on?
    True of /tmp and /dev/shm, where a folder's entries belong to who made them (the sticky bit)."""
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a user namespace root may have another number
    parent = parent.resolve()
    for folder in (parent, *parent.parents):
        found = folder.stat()
        if found.st_uid not in trusted or (found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX):
            return False
    return True


def is_own(path: Path, or_roots: bool = False) -> bool:
    """Is this file or folder our own (or root's, if `or_roots`), no link, and not for everybody to write? Only
    then is anything done that another could have written there."""
    try:
        found = path.lstat()
    except (OSError, ValueError):  # a ValueError where the path holds a NUL
        return False
    return (found.st_uid in ({os.geteuid(), 0} if or_roots else {os.geteuid()})
            and not found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode))


def read_own(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """Return the content of a file that this user owns and others cannot write; None for any other file. Owner and
    content are read from one descriptor, so that replacing a link or folder in between has no effect.

    Raises:
        UserError: there is none, or it cannot be read (`outside.open_regular`).
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
            return None
        return file.read(most)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    except OSError as error:
        # The kernel says "not a directory" of a link, too.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise NotPrivate("it is a link", path) from error
        raise


def _set_aside_what_is_not_ours(handle: int) -> None:
    """A stranger's file, left where a name of ours belongs, would stand in the way for ever."""
    for name in os.listdir(handle):
        if os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid != os.geteuid():
            os.rename(name, f".not-ours-{os.urandom(6).hex()}", src_dir_fd=handle, dst_dir_fd=handle)


def _check(handle: int, path: Path, unwanted: int) -> None:
    found = os.fstat(handle)
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to another user (uid {found.st_uid})", path)
    if found.st_mode & unwanted:
        raise NotPrivate(f"other users can use it (mode {stat.S_IMODE(found.st_mode):04o})", path)


def _plain(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in a folder")
    return name


# Records in private folders: each a JSON file that stands for one dataclass.
Record = TypeVar("Record")


def read_records(kind: type[Record], folder: Path, begin: str, most: int = MOST_BYTES) -> list[Record]:
    """The records of `kind` in the files whose names begin so, in their order. What is not such a record, is just
    being written, or was put there by another user is passed over, as is a folder that is not private."""
    found = []
    try:
        with open_private(folder) as opened:
            for name in opened.names(begin):
                where = str(folder / name)
                try:
                    found.append(as_dataclass(kind, parse_json(opened.read(name, most), where), where))
                except (OSError, UserError):
                    continue
    except OSError:
        return []
    return found


# The run's secret: what the processes of one run know, and other users of their nodes do not.
SECRET_VARIABLE = "EZPZ_LLM_SECRET"
_BYTES = 32


def new_secret() -> str:
    """A secret for one run, as the value of its variable."""
    return os.urandom(_BYTES).hex()


def run_secret(env: Mapping[str, str]) -> bytes | None:
    """The secret of the run that `env` belongs to; None where no launch gave one."""
    try:
        found = bytes.fromhex(env.get(SECRET_VARIABLE, ""))
    except ValueError:
        return None
    return found if len(found) == _BYTES else None


def derived(secret: bytes, *purpose: str) -> str:
    """A word for one purpose, which tells nothing of the secret or of its words for other purposes."""
    return hmac.new(secret, "\0".join(purpose).encode(), hashlib.sha256).hexdigest()
