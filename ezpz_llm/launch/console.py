"""What launch itself says on standard error. That nobody reads it (any more) ends nothing."""

from __future__ import annotations

import contextlib
import os
import sys

from ezpz_llm.base.clean import cleaned


def say(text: str) -> None:
    """Print lines, as far as somebody reads them, cleaned: hosts, paths and rank output are in them."""
    try:
        print(cleaned(text), file=sys.stderr, flush=True)
    except OSError:
        # EPIPE: the reader of `launch … 2>&1 | tee` has gone. EIO: the terminal was closed.
        leave(2)


def warn(text: str) -> None:
    """A line for the user that changes nothing about the run's outcome."""
    say(f"launch: warning: {text}")


def leave(descriptor: int) -> None:
    """Send to nothing what is still to be written there: Python's own last flush would change the exit code."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def are_one_place(descriptor: int, other: int) -> bool:
    """Do both lead to the same terminal, file or pipe?"""
    try:
        return os.path.sameopenfile(descriptor, other)
    except OSError:
        return False
