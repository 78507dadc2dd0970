"""Memory of a host that computes: kept from one step to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Names of parameters in malloc.h."""
_USERS_OWN = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_heap(environ: Mapping[str, str]) -> None:
    """Let this process keep the memory that it frees, for what it allocates next.

    glibc gives large blocks back to the system at once, and gets them anew, page by page and zeroed, in the next
    step: a sixth of the processor time of a step with a large vocabulary. torch pools memory of accelerators only.
    Left alone where the user has chosen the settings, and where the C library is not glibc; an allocator in glibc's
    place does not ask for its settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(environ.get(name) for name in _USERS_OWN):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
