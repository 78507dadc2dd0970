"""What this rank is doing, told when asked from outside (`ezpz-llm why`, --timeout-idle)."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Mapping
from typing import TextIO

from ezpz_llm.launch.variables import STACKS_SIGNAL, STACKS_VARIABLE

_KEPT_OPEN: list[TextIO] = []


def answer_with_stacks(env: Mapping[str, str]) -> None:
    """Write the Python stacks of all threads to the file that launch has named, whenever the node's agent sends
    STACKS_SIGNAL; also from within a collective that never ends, since the handler is C code."""
    if not env.get(STACKS_VARIABLE):
        return
    with contextlib.suppress(OSError):
        file = open(env[STACKS_VARIABLE], "a")  # noqa: SIM115 - stays open as long as the process lives
        _KEPT_OPEN.append(file)
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
