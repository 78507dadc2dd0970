"""Public files with known hashes, copied or downloaded to the cache; I/O errors as UserErrors; progress on stderr.

Files are kept in the cache (`cache_dir()`), so a machine without internet access needs one copied file and no
configuration. Downloads happen only on request, and every file is checked against its hash.
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

from ezpz_llm.core.base import UserError, cache_dir, print_lines, read_bytes
from ezpz_llm.core.rundir import write_atomic

_TIMEOUT_S = 60
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class PublicFile:
    """Public file with a known hash.

    Attributes:
        what: short description for messages.
        folder: folder in the cache.
        name: file name in that folder.
        size: bytes.
        provide: command that installs the file.
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
        """Path in the cache."""
        return cache_dir() / self.folder / self.name

    def find(self) -> Path:
        """Return the path of the file in the cache, after checking its hash.

        Raises:
            UserError: the file is missing, or its content is not the published content.
        """
        if not self.path.exists():
            raise UserError(f"{self.what} is not on this machine", where=str(self.path),
                            instead=f"install it once with: {self.provide}")
        self._check(read_bytes(self.path, _MAX_BYTES), str(self.path), f"install it again with: {self.provide}")
        return self.path

    def copy_from(self, source: Path) -> Path:
        """Copy a local file to the cache and return its new path.

        Raises:
            UserError: the file is missing, or has other content.
        """
        content = read_bytes(source, _MAX_BYTES)
        self._check(content, str(source), f"use the published file: {self.size:,} bytes, {self.address}")
        return self._store(content)

    def download(self) -> Path:
        """Download the file to the cache and return its path. Prints the address first.

        Raises:
            UserError: no network, or unexpected content.
        """
        print_lines(f"downloading {self.what}: {self.address} ({self.size:,} bytes, sha256 {self.sha256})",
                    file=sys.stderr)
        try:
            with urllib.request.urlopen(self.address, timeout=_TIMEOUT_S) as response:
                content = response.read(self.size + 1)
        except OSError as error:
            raise UserError(
                f"the download failed: {getattr(error, 'reason', None) or error}", where=self.address,
                instead=f"download it on a machine with internet access, then: {self.provide}",
            ) from error
        self._check(content, self.address, f"get the file elsewhere, then: {self.provide}")
        return self._store(content)

    def _check(self, content: bytes, where: str, instead: str) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            raise UserError(
                f"this is not {self.what}: {len(content):,} bytes with sha256 {sha256}, expected {self.sha256}",
                where=where, instead=instead,
            )

    def _store(self, content: bytes) -> Path:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, content)
        return self.path


@contextlib.contextmanager
def reading(path: Path):
    """Convert an OSError from reading `path` to a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read this file: {error.strerror or error}", where=str(path),
                        instead="pass a readable file") from error


@contextlib.contextmanager
def writing(path: Path):
    """Convert an OSError from writing `path` (disk full, no permission) to a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror or error}", where=str(error.filename or path),
            instead="free disk space, or use another folder (--out DIR, or EZPZ_LLM_CACHE for the cache)",
        ) from error


_SECONDS_BETWEEN_LINES = 10.0


def print_to_stderr(text: str) -> None:
    """Print one line to stderr."""
    print_lines(text, file=sys.stderr)


@contextlib.contextmanager
def progress(label: str, total_bytes: int, shown: bool, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr: a bar on a terminal, else a line every 10 s.

    Yields a function to call with the number of bytes just processed.

    Args:
        total_bytes: 0 if unknown.
        done: bytes processed earlier.
    """
    if not shown:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _progress_bar(label, total_bytes, done) as advance:
            yield advance
    else:
        yield _line_printer(label, total_bytes, done)


@contextlib.contextmanager
def _progress_bar(label: str, total: int, initial_bytes: int) -> Iterator[Callable[[int], None]]:
    # rich is slow to import, and only a terminal needs it.
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
        task = bar.add_task(label, total=total or None, completed=initial_bytes)
        yield lambda count: bar.advance(task, count)


def _line_printer(label: str, total: int, initial_bytes: int) -> Callable[[int], None]:
    began = last = time.monotonic()
    processed = initial_bytes
    of = f" of {total / 1e6:,.1f}" if total else ""

    def advance(count: int) -> None:
        """Add `count` bytes, and print a line if the previous line is at least 10 s old."""
        nonlocal last, processed
        processed += count
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            print_to_stderr(f"{label}: {processed / 1e6:,.1f}{of} MB, "
                            f"{(processed - initial_bytes) / 1e6 / (now - began):,.1f} MB/s")

    return advance
