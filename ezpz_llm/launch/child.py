"""Launch as a child process: a run started from another command, waited for and ended in order; without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ezpz_llm.base import EXIT_IDLE
from ezpz_llm.rundir import RUN_DIR_VARIABLE


def launch_words(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command line that launches `command` with these options of launch, by this very Python."""
    return [sys.executable, "-m", "ezpz_llm.launch", *options, "--", *command]


def run_launch(words: Sequence[str], *, variables: Mapping[str, str] | None = None, cwd: Path | str | None = None,
               output: IO[bytes] | IO[str] | None = None, limit_s: float | None = None,
               end_within_s: float = 60.0) -> int:
    """Start `words`, of `launch_words`, and wait for the end of the run; launch's exit code.

    However the waiting ends (by an exception, say, or SystemExit in a signal's handler), the run is ended too:
    launch ends its ranks when it is told to end.

    Args:
        variables: set beside this process's own, of which only the run directory of a run around is left out.
        output: takes standard output and standard error; without it launch has this process's.
        limit_s: the run is ended after so long, with exit code 124.
        end_within_s: how long launch may take to end the ranks.
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
