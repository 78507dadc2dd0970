"""Asking a scheduler's own command: bounded in time, tried twice, and never an error."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BETWEEN_TRIES_S = 0.3


@dataclass(frozen=True)
class Answer:
    """What a command printed, or (`text` is None) why it printed nothing that can be used."""

    text: str | None
    complaint: str = ""


def ask_command(words: Sequence[str], env: Mapping[str, str], limit_s: float, tries: int) -> Answer:
    """The output of a command, which may take `limit_s` each time; servers under load often answer the second time.

    Only a program on the PATH of `env` is run.
    """
    program = shutil.which(words[0], path=env.get("PATH", ""))
    if program is None:
        return Answer(None, f"{words[0]} is not on PATH")
    complaint = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(_BETWEEN_TRIES_S)
        try:
            done = subprocess.run([program, *words[1:]], env=dict(env), stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            complaint = f"no answer within {limit_s:g} s"
            continue
        except OSError as error:
            complaint = str(error)
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Answer(done.stdout.decode(errors="replace"))
        said = done.stderr.decode(errors="replace").strip().splitlines()
        complaint = f"code {done.returncode}" + (f", {said[-1]!r}" if said else ", and nothing said")
    return Answer(None, f"`{shlex.join(words)}` failed: {complaint}")
