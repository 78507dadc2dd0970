"""Atomic creation of a folder, safe with concurrent processes, and the journal of an unfinished preparation."""

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
from pathlib import Path
from typing import Any

from msgspec import Struct

from ezpz_llm.core.base import UserError, read_json
from ezpz_llm.core.base.records import Whole, as_plain, as_record
from ezpz_llm.core.rundir import write_atomic
from ezpz_llm.training.data.manifest import TokenizerEntry

_LOCK = ".lock"
_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_EXISTS = {errno.EEXIST, errno.ENOTEMPTY}
# A running process writes its journal every few seconds.
_ABANDONED_AFTER_S = 600


@contextlib.contextmanager
def build_folder(folder: Path, complete: Callable[[], bool], on_wait: Callable[[], None]) -> Iterator[Path | None]:
    """Yield a hidden folder beside `folder`, and rename it to `folder` if the block succeeds.

    Yields None if `folder` is complete already, for example because another process has just created it. The hidden
    folder may contain the work of a killed process. If the block fails, a hidden folder with a journal is kept, so
    that a later run can resume; a hidden folder without a journal is removed.

    On one node, a file lock admits one process at a time; the kernel releases it when its holder dies. Nodes use
    separate hidden folders, because not every shared file system propagates locks: the first node to finish wins,
    and the work of the other nodes is discarded. A hidden folder whose journal has not changed for ten minutes is
    taken over.

    Args:
        complete: returns True if `folder` is complete.
        on_wait: called once if another process holds the lock.

    Raises:
        OSError: the parent folder is not writable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f"{_hidden_prefix(folder)}{socket.gethostname()}")
    with contextlib.ExitStack() as stack:
        while not complete():
            if not hidden.exists():
                _take_over(folder, hidden)
            try:
                locked = _lock(hidden, stack, on_wait)
            except OSError as error:
                if error.errno not in _LOCKS_UNSUPPORTED:
                    raise
                hidden = hidden.with_name(f"{hidden.name}-{os.getpid()}")
                _take_over(folder, hidden)
                hidden.mkdir(exist_ok=True)
                locked = True
            if locked:
                yield from _build(hidden, folder, complete)
                return
        yield None


def _hidden_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


def _take_over(folder: Path, hidden: Path) -> None:
    """Rename a hidden folder that another node has abandoned, if any, to `hidden`."""
    for candidate in sorted(folder.parent.glob(f"{_hidden_prefix(folder)}*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - (candidate / JOURNAL).stat().st_mtime > _ABANDONED_AFTER_S:
                # If two processes try, the second gets FileNotFoundError.
                os.rename(candidate, hidden)
                return


def _lock(hidden: Path, stack: contextlib.ExitStack, on_wait: Callable[[], None]) -> bool:
    """Lock the hidden folder; return False if the previous holder has renamed or removed it."""
    hidden.mkdir(exist_ok=True)
    try:
        lock = stack.enter_context((hidden / _LOCK).open("w"))
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
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
                if error.errno not in _EXISTS or not complete():
                    raise
                (hidden / JOURNAL).unlink(missing_ok=True)
    finally:
        # After our rename, a hidden folder of this name belongs to another process.
        if not renamed and not (hidden / JOURNAL).exists():
            _discard(hidden)
    for name in (JOURNAL, _LOCK):
        (folder / name).unlink(missing_ok=True)


def clear(hidden: Path, kept: Sequence[str] = ()) -> None:
    """Remove the files in the hidden folder, except its lock and names that end in one of `kept`."""
    for path in hidden.iterdir():
        if path.name != _LOCK and not path.name.endswith(tuple(kept)):
            path.unlink()


def _discard(hidden: Path) -> None:
    # Rename first, so that a process that creates the hidden folder again never sees it half removed.
    renamed = hidden.with_name(f"{hidden.name}-{os.getpid()}-gone")
    os.rename(hidden, renamed)
    shutil.rmtree(renamed)


JOURNAL = ".journal.json"
_MAX_BYTES = 256 << 20
"""Size limit of a journal, which stores one count per id of the vocabulary."""


class InterruptedWriteError(UserError):
    """Error after which the journal is kept, so that a later run can resume."""


class Written(Struct, frozen=True):
    """Number of tokens written to a split."""

    tokens: Whole


class Journal(Struct):
    """Progress of `prepare`, saved beside unfinished shards so that a later process can resume.

    Attributes:
        request: fingerprint of the request.
        tokenizer: the tokenizer's manifest entry.
        after: position in the corpus to resume from (see `ezpz_llm.training.data.reader`); empty at the start.
        documents: number of documents read so far.
        source_bytes: bytes read so far.
        counts: number of occurrences of each id so far; empty before the first token.
        written: number of tokens written, by split.
        read_all: True once the whole corpus is read and the validation split is copied from its last tokens.
        facts: metadata of the source, such as the revision of a data set.
        broken: number of documents skipped so far.
        broken_first: location and error of the first 100 skipped documents.
        marks: number of byte-order marks dropped so far.
        special_tokens: number of special tokens in the text so far.
    """

    request: str
    tokenizer: TokenizerEntry
    after: dict[str, Any] = {}
    documents: Whole = 0
    source_bytes: Whole = 0
    counts: list[Whole] = []
    written: dict[str, Written] = {}
    read_all: bool = False
    facts: dict[str, str] = {}
    broken: Whole = 0
    broken_first: list[str] = []
    marks: Whole = 0
    special_tokens: Whole = 0

    @classmethod
    def load(cls, folder: Path, request: str) -> Journal | None:
        """Return the journal in `folder`, or None if it is missing, invalid or belongs to another request."""
        try:
            journal = as_record(cls, read_json(folder / JOURNAL, _MAX_BYTES), JOURNAL)
        except UserError:
            return None
        return journal if journal.request == request else None

    def save(self, folder: Path) -> None:
        """Replace the journal in `folder` atomically."""
        write_atomic(folder / JOURNAL, json.dumps(as_plain(self)))
