"""Heartbeats: a node-local file per rank, at most once a second, and stacks on request (standard library only)."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ezpz_llm.launch.variables import HEARTBEAT_VARIABLE, STACKS_SIGNAL, STACKS_VARIABLE
from ezpz_llm.rundir import SideFiles


class Heartbeat:
    """Writes this rank's phase (launch/variables.py) and step to the file that launch has named, whose changes tell
    its watchdog that the rank lives. Without launch nobody watches, and nothing is written."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get(HEARTBEAT_VARIABLE)
        self._path = Path(path) if path else None
        self._last = ("", 0.0)
        self._side = SideFiles()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Say what this rank is doing. A new phase is written at once, the same one at most once a second."""
        now = time.monotonic()
        if self._path is None or (phase == self._last[0] and now - self._last[1] < 1.0):
            return
        self._last = (phase, now)
        # In place: a reader may see half a line, but the step is spared a rename.
        path, text = self._path, f"{phase} {'' if step is None else step}\n"
        self._side.attempt("this rank's sign of life", lambda: path.write_text(text))


# What this rank is doing, told when asked from outside (`ezpz-llm why`, --idle-timeout).
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
