"""Heartbeat file of each rank on its node, and stack dumps on request (standard library only)."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ezpz_llm.core.rundir import SideFiles
from ezpz_llm.launcher.basics.variables import HEARTBEAT_VARIABLE, STACKS_SIGNAL, STACKS_VARIABLE


class Heartbeat:
    """Writer of this rank's phase (launcher/basics/variables.py) and step to the file that launch's watchdog reads.

    Writes nothing if launch did not start the run.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get(HEARTBEAT_VARIABLE)
        self._path = Path(path) if path else None
        self._last = ("", 0.0)
        self._side = SideFiles()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Report this rank's phase and step. Writes a new phase at once, other updates at most once a second."""
        now = time.monotonic()
        if self._path is None or (phase == self._last[0] and now - self._last[1] < 1.0):
            return
        self._last = (phase, now)
        # Written in place: a reader may see an incomplete line, but a rename would cost more time in the step.
        path, text = self._path, f"{phase} {'' if step is None else step}\n"
        self._side.attempt("this rank's heartbeat", lambda: path.write_text(text))


_KEPT_OPEN: list[TextIO] = []


def answer_with_stacks(env: Mapping[str, str]) -> None:
    """Register a handler of STACKS_SIGNAL that writes the Python stacks of all threads to launch's file.

    The node's agent sends the signal for `ezpz-llm why` and --idle-timeout. The handler is C code, so that it works
    in a hanging collective, too.
    """
    if not env.get(STACKS_VARIABLE):
        return
    with contextlib.suppress(OSError):
        file = open(env[STACKS_VARIABLE], "a")  # noqa: SIM115 - open until the process exits
        _KEPT_OPEN.append(file)
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
