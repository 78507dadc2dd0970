"""Making a folder that appears whole or not at all, whoever else is making it at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

_LOCK = ".lock"
_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_ALREADY_THERE = {errno.EEXIST, errno.ENOTEMPTY}


@contextlib.contextmanager
def building(folder: Path, complete: Callable[[], bool], waiting: Callable[[], None]) -> Iterator[Path | None]:
    """Gives a hidden folder beside `folder` to write in, and renames it to `folder` when the block ends well.

    Gives None where `folder` is complete already, perhaps because another process has just made it. Processes of
    one host take turns by a file lock, which the system releases when its holder dies; the next one clears what
    a killed one left and starts again. Hosts do not share a hidden folder (file systems differ in whether locks
    reach over hosts): the first to finish wins, the others' work is dropped.

    Args:
        complete: whether `folder` stands finished.
        waiting: called once, if another process holds the lock.

    Raises:
        OSError: the place cannot be written; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}.partial-{socket.gethostname()}")
    with contextlib.ExitStack() as stack:
        while not complete():
            try:
                held = _hold(hidden, stack, waiting)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                hidden = hidden.with_name(f"{hidden.name}-{os.getpid()}")
                hidden.mkdir(exist_ok=True)
                held = True
            if held:
                yield from _build(hidden, folder, complete)
                return
        yield None


def _hold(hidden: Path, stack: contextlib.ExitStack, waiting: Callable[[], None]) -> bool:
    """Lock the hidden folder; False if its last holder has meanwhile renamed or removed it."""
    hidden.mkdir(exist_ok=True)
    try:
        lock = stack.enter_context((hidden / _LOCK).open("w"))
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(hidden / _LOCK))
    except FileNotFoundError:
        return False


def _build(hidden: Path, folder: Path, complete: Callable[[], bool]) -> Iterator[Path | None]:
    renamed = False
    try:
        if complete():
            yield None
        else:
            for left_over in hidden.iterdir():
                if left_over.name != _LOCK:
                    left_over.unlink()
            yield hidden
            renamed = _rename(hidden, folder, complete)
    finally:
        # Once renamed, a hidden folder of this name is another process's.
        if not renamed:
            _discard(hidden)
    (folder / _LOCK).unlink(missing_ok=True)


def _rename(hidden: Path, folder: Path, complete: Callable[[], bool]) -> bool:
    try:
        os.rename(hidden, folder)
    except OSError as error:
        if error.errno not in _ALREADY_THERE or not complete():
            raise
        return False
    return True


def _discard(hidden: Path) -> None:
    # Renamed first: whoever makes the hidden folder anew must not find it half removed.
    gone = hidden.with_name(f"{hidden.name}-{os.getpid()}-gone")
    os.rename(hidden, gone)
    shutil.rmtree(gone)
