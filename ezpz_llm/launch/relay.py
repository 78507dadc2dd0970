"""The launcher's standard error: passed on as it comes, and kept."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading

from ezpz_llm.rundir.layout import RunDir

_DRAIN_S = 1.0


class Relay:
    """Reads the pipe to its end in a thread, so that the launcher never waits for us."""

    def __init__(self, launcher: subprocess.Popen[bytes], run_dir: RunDir) -> None:
        self._source = launcher.stderr.fileno()
        self._log = run_dir.launcher_log.open("wb", buffering=0)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is still there; a process that has kept the pipe open is not waited for."""
        self._thread.join(_DRAIN_S)

    def _pass_on(self) -> None:
        while data := os.read(self._source, 65536):
            with contextlib.suppress(OSError):
                # A full disk must not stop the run's words.
                self._log.write(data)
            with contextlib.suppress(BrokenPipeError):
                while data:
                    data = data[os.write(2, data):]
