"""Public files of known content: copied in from a local file or, only when asked, downloaded; checked either way.

They are kept in the cache (`cache_dir()`), so a machine without internet needs one copied file and no setting.
Beside them: what the system refuses, as errors of the user's, and how far the work has come, on stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import UserError, cache_dir, cleaned, read_bytes
from ezpz_llm.rundir import write_atomic

_TIMEOUT_S = 60
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class PublicFile:
    """A file that anyone can get, known by its hash.

    Attributes:
        what: what it is, in a few words.
        folder: its folder in the cache.
        name: its file name there.
        size: bytes.
        provide: the command that provides it.
    """

    what: str
    folder: str
    name: str
    address: str
    size: int
    sha256: str
    provide: str

    @property
    def path(self) -> Path:
        """Path of the file once downloaded."""
        return cache_dir() / self.folder / self.name

    def find(self) -> Path:
        """Its path.

        Raises:
            UserError: it is not there, or its content is not the published one.
        """
        if not self.path.exists():
            raise UserError(f"{self.what} is not on this machine", where=str(self.path),
                            instead=f"provide it once with: {self.provide}")
        self._check(read_bytes(self.path, _MOST_BYTES), str(self.path), f"provide it again with: {self.provide}")
        return self.path

    def copy_from(self, source: Path) -> Path:
        """Copy it in from a local file, which is only read.

        Raises:
            UserError: no such file, or other content.
        """
        content = read_bytes(source, _MOST_BYTES)
        self._check(content, str(source), f"it should have {self.size:,} bytes, as at {self.address}")
        return self._keep(content)

    def download(self) -> Path:
        """Fetch it from its public address, which is printed first.

        Raises:
            UserError: no network, or other content than expected.
        """
        print(f"downloading {self.what}: {self.address} ({self.size:,} bytes, sha256 {self.sha256})",
              file=sys.stderr, flush=True)
        try:
            with urllib.request.urlopen(self.address, timeout=_TIMEOUT_S) as answer:
                content = answer.read(self.size + 1)
        except OSError as error:
            raise UserError(
                f"the download failed: {getattr(error, 'reason', None) or error}", where=self.address,
                instead=f"fetch it on a machine with internet, then: {self.provide}",
            ) from error
        self._check(content, self.address, f"get it elsewhere, then: {self.provide}")
        return self._keep(content)

    def _check(self, content: bytes, where: str, instead: str) -> None:
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise UserError(
                f"this is not {self.what}: {len(content):,} bytes with sha256 {found}, expected {self.sha256}",
                where=where, instead=instead,
            )

    def _keep(self, content: bytes) -> Path:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, content)
        return self.path


@contextlib.contextmanager
def reading(path: Path):
    """Turn the system's refusal to read `path` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror or error}", where=str(path),
                        instead="name a readable file") from error


@contextlib.contextmanager
def writing(path: Path):
    """Turn the system's refusal to write at `path` (full disk, no right) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror or error}", where=str(error.filename or path),
            instead="make room, or name another place (--out DIR, or EZPZ_LLM_CACHE for the cache)",
        ) from error


# Progress on stderr: a bar on a terminal, a line now and then elsewhere.
_SECONDS_BETWEEN_LINES = 10.0


def say(text: str) -> None:
    """One line on stderr."""
    print(cleaned(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(label: str, total_bytes: int, shown: bool, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of bytes just done.

    Args:
        total_bytes: 0 where that is not known.
        done: bytes done before.
    """
    if not shown:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(label, total_bytes, done) as advance:
            yield advance
    else:
        yield _lines(label, total_bytes, done)


@contextlib.contextmanager
def _bar(label: str, total: int, done_before: int) -> Iterator[Callable[[int], None]]:
    # Imported here: only a terminal needs it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn as Speed,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total or None, completed=done_before)
        yield lambda done: bar.advance(task, done)


def _lines(label: str, total: int, done_before: int) -> Callable[[int], None]:
    began = last = time.monotonic()
    done_so_far = done_before
    of = f" of {total / 1e6:,.1f}" if total else ""

    def advance(done: int) -> None:
        """Count `done` bytes more, and print a line if the last one is long enough ago."""
        nonlocal last, done_so_far
        done_so_far += done
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{label}: {done_so_far / 1e6:,.1f}{of} MB, "
                f"{(done_so_far - done_before) / 1e6 / (now - began):,.1f} MB/s")

    return advance
