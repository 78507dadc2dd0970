"""Private folders, records in them, and the run's secret, for locations where other users can write (/dev/shm).

A folder is created with mode 0700, opened without following a link, and checked by its descriptor. All later access
uses that descriptor, so that another user cannot redirect it by replacing the path. Files in the folder are opened
without following links and must also belong to this user, because the folder may have been open to others before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.schema import as_dataclass
from ezpz_llm.core.base.untrusted_input import MAX_BYTES, open_regular, parse_json

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags of every open. O_NONBLOCK: never wait for the other end of a FIFO."""
_MAX_BYTES = 1 << 24
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ACCESS = stat.S_IRWXG | stat.S_IRWXO


class NotPrivate(PermissionError):
    """Error for a folder or file that is not private, for example of another user. `strerror` is the reason."""

    def __init__(self, why: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, why, str(path))


class PrivateFolder:
    """Open private folder; see `make_private` and `open_private`. Names must not contain a slash.

    Methods raise OSError if the file system reports an error. Methods that open a file raise NotPrivate if another
    user owns the file, or if it is not a regular file or FIFO with a single hard link.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    def read(self, name: str, most: int = _MAX_BYTES) -> bytes:
        """Return the content of a file, up to `most` bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(most)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file atomically: a reader sees the old content or the new content."""
        temporary = f".{_checked_name(name)}.{os.urandom(6).hex()}"
        try:
            self.create(temporary, data)
            os.replace(temporary, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError as error:
            self.remove(temporary)
            # The error of a full disk has no file name.
            error.filename = str(self.path / name)
            raise
        except BaseException:
            self.remove(temporary)
            raise

    def create(self, name: str, data: bytes = b"") -> None:
        """Create a file.

        Raises:
            FileExistsError: the file exists.
        """
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a file in place, at half the cost of `write`. A reader may see incomplete content."""
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(data)
            file.truncate()

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a regular file or FIFO that belongs to this user. New files have mode 0600."""
        # O_TRUNC would truncate the file before its owner is checked.
        assert not flags & os.O_TRUNC
        handle = os.open(_checked_name(name), flags | _FLAGS, 0o600, dir_fd=self._handle)
        try:
            status = os.fstat(handle)
            if status.st_uid != os.geteuid():
                raise NotPrivate(f"it belongs to another user (uid {status.st_uid})", self.path / name)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                raise NotPrivate("it is not a regular file", self.path / name)
            if status.st_nlink > 1:
                # If the folder was open to others, they may have linked another file of this user to this name.
                raise NotPrivate("it has more than one hard link", self.path / name)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def make_fifo(self, name: str) -> None:
        """Create a FIFO, unless the name exists."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(_checked_name(name), 0o600, dir_fd=self._handle)

    def stat(self, name: str) -> os.stat_result:
        """Return a file's `os.stat_result`, without following links.

        Raises:
            NotPrivate: the file belongs to another user.
        """
        status = os.stat(_checked_name(name), dir_fd=self._handle, follow_symlinks=False)
        if status.st_uid != os.geteuid():
            raise NotPrivate(f"it belongs to another user (uid {status.st_uid})", self.path / name)
        return status

    def touch(self, name: str) -> None:
        """Set a file's modification time to now. Create the file if it does not exist."""
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            os.utime(file.fileno())

    def has(self, name: str) -> bool:
        """Return True if a file with that name exists and belongs to this user."""
        try:
            self.stat(name)
        except OSError:
            return False
        return True

    def names(self, begin: str = "") -> list[str]:
        """Return the sorted names that begin with `begin`. Without `begin`, hidden names are omitted."""
        return sorted(name for name in os.listdir(self._handle)
                      if name.startswith(begin) and (begin or not name.startswith(".")))

    def remove(self, name: str) -> None:
        """Remove a file or a link, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_checked_name(name), dir_fd=self._handle)

    def close(self) -> None:
        """Close the descriptor. The folder is kept."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def make_private(path: Path) -> PrivateFolder:
    """Create the folder if it does not exist, and open it. The umask has no effect.

    If other users could access an existing folder of this user, its mode is set to 0700. If they could write to it,
    their files in it are renamed.

    Raises:
        NotPrivate: another user owns the folder, the path is a link, or the file system does not store modes.
        OSError: the folder cannot be created, or the path is a file.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    handle = _open(path)
    try:
        _check_access(handle, path, 0)
        mode = os.fstat(handle).st_mode
        if mode & 0o777 != 0o700:
            os.fchmod(handle, 0o700)
        _check_access(handle, path, _OTHERS_ACCESS)
        if mode & _OTHERS_WRITE:
            _rename_files_of_others(handle)
    except BaseException:
        os.close(handle)
        raise
    return PrivateFolder(path, handle)


def open_private(path: Path) -> PrivateFolder:
    """Open an existing folder without changing it.

    Raises:
        NotPrivate: another user owns the folder or can write to it, or the path is a link.
        OSError: the folder does not exist, or the path is a file.
    """
    handle = _open(path)
    try:
        _check_access(handle, path, _OTHERS_WRITE)
    except BaseException:
        os.close(handle)
        raise
    return PrivateFolder(path, handle)


def remove_private(path: Path) -> None:
    """Remove a folder of this user with its content. Ignores folders of other users, and all errors."""
    with contextlib.suppress(OSError), open_private(path):
        # Imported here because every rank's shim imports this module, but few remove a folder.
        import shutil

        # rmtree does not follow links, and no other user can add files to a private folder.
        shutil.rmtree(path, ignore_errors=True)


def is_protected_from_others(parent: Path) -> bool:
    """Return True if only root and this user can rename or replace files that this user creates in `parent`.

    The path can then be passed to other programs. True for /tmp and /dev/shm, which have the sticky bit.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a user namespace, root may have another uid
    parent = parent.resolve()
    for folder in (parent, *parent.parents):
        status = folder.stat()
        if status.st_uid not in trusted or (status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX):
            return False
    return True


def is_own(path: Path, or_roots: bool = False) -> bool:
    """Return True if a file or folder can be trusted: it belongs to this user (or to root, if `or_roots`), is not a
    link, and is not world-writable."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # ValueError if the path contains a NUL
        return False
    return (status.st_uid in ({os.geteuid(), 0} if or_roots else {os.geteuid()})
            and not status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode))


def read_own(path: Path, most: int = MAX_BYTES) -> bytes | None:
    """Return up to `most` bytes of a file, or None if another user owns it or it is world-writable.

    Owner and content are read from the same descriptor, so that replacing the path in between has no effect.

    Raises:
        UserError: the file does not exist or cannot be read (`untrusted_input.open_regular`).
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            return None
        return file.read(most)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    except OSError as error:
        # The kernel reports ENOTDIR for a link, too.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise NotPrivate("it is a link", path) from error
        raise


def _rename_files_of_others(handle: int) -> None:
    """Rename files of other users, since this user may need their names."""
    for name in os.listdir(handle):
        if os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid != os.geteuid():
            os.rename(name, f".not-ours-{os.urandom(6).hex()}", src_dir_fd=handle, dst_dir_fd=handle)


def _check_access(handle: int, path: Path, forbidden_mode: int) -> None:
    status = os.fstat(handle)
    if status.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to another user (uid {status.st_uid})", path)
    if status.st_mode & forbidden_mode:
        raise NotPrivate(f"other users can access it (mode {stat.S_IMODE(status.st_mode):04o})", path)


def _checked_name(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


Record = TypeVar("Record")


def read_records(kind: type[Record], folder: Path, begin: str, most: int = MAX_BYTES) -> list[Record]:
    """Return the records in the JSON files whose names begin with `begin`, sorted by name.

    Skips files that are not a record of this kind, are incomplete, or belong to another user. Returns an empty list
    if the folder is missing or not private.
    """
    records = []
    try:
        with open_private(folder) as opened:
            for name in opened.names(begin):
                where = str(folder / name)
                try:
                    records.append(as_dataclass(kind, parse_json(opened.read(name, most), where), where))
                except (OSError, UserError):
                    continue
    except OSError:
        return []
    return records


SECRET_VARIABLE = "EZPZ_LLM_SECRET"
"""Environment variable with the run's secret, which other users of the nodes do not know."""
_SECRET_BYTES = 32


def new_secret() -> str:
    """Return a new secret for a run, in hexadecimal."""
    return os.urandom(_SECRET_BYTES).hex()


def run_secret(env: Mapping[str, str]) -> bytes | None:
    """Return the run's secret from the environment `env`; None if it is missing or invalid."""
    try:
        secret = bytes.fromhex(env.get(SECRET_VARIABLE, ""))
    except ValueError:
        return None
    return secret if len(secret) == _SECRET_BYTES else None


def derive_key(secret: bytes, *purpose: str) -> str:
    """Return a key for one purpose, derived from the secret. It reveals neither the secret nor other keys."""
    import hashlib  # loads OpenSSL, which a plan does not need
    import hmac

    return hmac.new(secret, "\0".join(purpose).encode(), hashlib.sha256).hexdigest()
