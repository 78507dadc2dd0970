"""Memory that glibc keeps between steps on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt in glibc's malloc.h."""
_MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Stop glibc from returning freed memory to the kernel between steps.

    glibc returns large blocks immediately, and the kernel zeroes each page again in the next step. This takes a
    sixth of the CPU time of a step with a large vocabulary. torch caches only the memory of accelerators. No effect
    if the user has set malloc variables, with another C library, or with a replaced allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(environ.get(name) for name in _MALLOC_VARIABLES):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
