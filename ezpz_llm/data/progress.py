"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from ezpz_llm.base.errors import cleaned

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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total or None, completed=done_before)
        yield lambda done: bar.advance(task, done)


def _lines(label: str, total: int, done_before: int) -> Callable[[int], None]:
    began = last = time.monotonic()
    done_so_far = done_before
    of = f" of {total / 1e6:,.1f}" if total else ""

    def advance(done: int) -> None:
        nonlocal last, done_so_far
        done_so_far += done
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{label}: {done_so_far / 1e6:,.1f}{of} MB, "
                f"{(done_so_far - done_before) / 1e6 / (now - began):,.1f} MB/s")

    return advance
