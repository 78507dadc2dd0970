"""Evidence that /dev/shm is full, for ranks that fail without naming it."""

from __future__ import annotations

import os

_FOLDER = "/dev/shm"
_FULL_BYTES = 1 << 20
"""Free bytes below which /dev/shm is full. A data loader's or MPI's smallest segment is larger."""


def find_full_shared_memory() -> str | None:
    """Return the evidence as text, or None if /dev/shm has free space or does not exist."""
    try:
        usage = os.statvfs(_FOLDER)
    except OSError:
        return None
    free, total = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    if free >= _FULL_BYTES:
        return None
    return f"{_FOLDER} is full: {free >> 10} of {total >> 10} KiB are free"
