"""launch as a child process of another command (without torch)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ezpz_llm.core.base import EXIT_IDLE
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE


def launch_words(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command line that runs launch with `options` and `command` under this Python interpreter."""
    return [sys.executable, "-m", "ezpz_llm.launch", *options, "--", *command]


def run_launch(words: Sequence[str], *, variables: Mapping[str, str] | None = None, cwd: Path | str | None = None,
               output: IO[bytes] | IO[str] | None = None, limit_s: float | None = None,
               end_within_s: float = 60.0) -> int:
    """Run a command line from `launch_words` and return launch's exit code.

    An exception while waiting, including SystemExit in a signal handler, ends the run: launch receives SIGTERM and
    ends its ranks.

    Args:
        variables: added to this process's environment, from which the run directory of an outer run is removed.
        output: receives standard output and standard error; by default launch inherits both.
        limit_s: time limit of the run; if it is exceeded, the exit code is 124.
        end_within_s: time from SIGTERM to SIGKILL.
    """
    env = {name: value for name, value in os.environ.items() if name != RUN_DIR_VARIABLE} | dict(variables or {})
    launch = subprocess.Popen(words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output,
                              stderr=None if output is None else subprocess.STDOUT)
    try:
        return launch.wait(limit_s)
    except subprocess.TimeoutExpired:
        return EXIT_IDLE
    finally:
        if launch.poll() is None:
            launch.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.wait(end_within_s)
            launch.kill()
            launch.wait()
