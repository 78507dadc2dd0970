"""Folders that appear whole or not at all, even if two processes make one; the journal of a preparation."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, as_dataclass, read_json
from ezpz_llm.rundir import write_atomic

_LOCK = ".lock"
_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_ALREADY_THERE = {errno.EEXIST, errno.ENOTEMPTY}
# A living builder writes its journal every few seconds.
_ABANDONED_AFTER_S = 600


@contextlib.contextmanager
def building(folder: Path, complete: Callable[[], bool], waiting: Callable[[], None]) -> Iterator[Path | None]:
    """Gives a hidden folder beside `folder` to write in, and renames it to `folder` when the block ends well.

    Gives None where `folder` is complete already, perhaps because another process has just made it. Processes of
    one host take turns by a file lock, which the system releases when its holder dies. The hidden folder holds
    what a killed one left; where the block fails it stays if there is a journal in it, to be gone on with, and is
    removed otherwise. Hosts do not share a hidden folder (file systems differ in whether locks reach over hosts):
    the first to finish wins, the others' work is dropped; but one whose journal has not changed for ten minutes
    is taken over.

    Args:
        complete: whether `folder` stands finished.
        waiting: called once, if another process holds the lock.

    Raises:
        OSError: the place cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f"{_beginning(folder)}{socket.gethostname()}")
    with contextlib.ExitStack() as stack:
        while not complete():
            if not hidden.exists():
                _take_over(folder, hidden)
            try:
                held = _hold(hidden, stack, waiting)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                hidden = hidden.with_name(f"{hidden.name}-{os.getpid()}")
                _take_over(folder, hidden)
                hidden.mkdir(exist_ok=True)
                held = True
            if held:
                yield from _build(hidden, folder, complete)
                return
        yield None


def _beginning(folder: Path) -> str:
    return f".{folder.name}.partial-"


def _take_over(folder: Path, hidden: Path) -> None:
    """Rename a hidden folder that another host has abandoned, if there is one, to `hidden`."""
    for other in sorted(folder.parent.glob(f"{_beginning(folder)}*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - (other / JOURNAL).stat().st_mtime > _ABANDONED_AFTER_S:
                # Of two that try, one renames it; the other finds it gone.
                os.rename(other, hidden)
                return


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
            (hidden / JOURNAL).unlink(missing_ok=True)
            yield None
        else:
            yield hidden
            try:
                os.rename(hidden, folder)
                renamed = True
            except OSError as error:
                if error.errno not in _ALREADY_THERE or not complete():
                    raise
                (hidden / JOURNAL).unlink(missing_ok=True)
    finally:
        # Once renamed, a hidden folder of this name is another process's.
        if not renamed and not (hidden / JOURNAL).exists():
            _discard(hidden)
    for name in (JOURNAL, _LOCK):
        (folder / name).unlink(missing_ok=True)


def clear(hidden: Path, but: Sequence[str] = ()) -> None:
    """Remove what is in the hidden folder, but for the lock that is held on it and files with these endings."""
    for left_over in hidden.iterdir():
        if left_over.name != _LOCK and not left_over.name.endswith(tuple(but)):
            left_over.unlink()


def _discard(hidden: Path) -> None:
    # Renamed first: whoever makes the hidden folder anew must not find it half removed.
    gone = hidden.with_name(f"{hidden.name}-{os.getpid()}-gone")
    os.rename(hidden, gone)
    shutil.rmtree(gone)


# How far `prepare` has come: kept beside the shards that it writes, so that a killed one is gone on with.
JOURNAL = ".journal.json"
_MOST_BYTES = 256 << 20
"""It counts every id of a vocabulary."""


class Interrupted(UserError):
    """The work ended for a reason that is not in the corpus: what was written stays, to be gone on with."""


@dataclass
class Journal:
    """The state of an unfinished folder of shards.

    Attributes:
        request: fingerprint of what is being made.
        tokenizer: its manifest entry.
        after: the place in the corpus to go on from (see `ezpz_llm.data.reader`); empty at the start.
        documents, source_bytes: begun and read so far.
        counts: how often each id occurred so far; empty for not at all.
        written: the tokens of each split.
        read_all: the corpus is at its end, and the validation split has been copied out of the tokens.
        facts: what the source said of itself, such as the revision of a data set.
        broken: documents that were left out so far; broken_first: what is wrong with the first hundred, and where.
        marks: byte-order marks that were dropped so far.
    """

    request: str
    tokenizer: dict[str, Any]
    after: dict[str, Any] = field(default_factory=dict)
    documents: int = 0
    source_bytes: int = 0
    counts: list[int] = field(default_factory=list)
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_all: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    broken: int = 0
    broken_first: list[str] = field(default_factory=list)
    marks: int = 0

    @classmethod
    def load(cls, folder: Path, request: str) -> Journal | None:
        """The journal in `folder`, if there is one and it is of this request."""
        try:
            found = as_dataclass(cls, read_json(folder / JOURNAL, _MOST_BYTES), JOURNAL)
        except UserError:
            return None
        return found if found.request == request else None

    def save(self, folder: Path) -> None:
        """Replace the journal in `folder`, in one step."""
        # Not asdict, which copies each of the counts.
        write_atomic(folder / JOURNAL, json.dumps(vars(self)))
