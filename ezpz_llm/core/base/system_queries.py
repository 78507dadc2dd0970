"""Answers of the operating system and of other programs, which may be missing, late, or too long."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.untrusted_input import MAX_BYTES, open_regular

_BETWEEN_TRIES_S = 0.3


def system_text(path: str | Path, last: int | None = None, most: int = MAX_BYTES, errors: str = "replace") -> str:
    """Return the last `last` or the first `most` bytes of a log or a file in /proc or /sys, as text.

    Such files may disappear at any time: returns "" if the file cannot be read or is not a regular file.
    """
    try:
        with open_regular(Path(path)) as file:
            if last is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
                most = last
            return file.read(most).decode(errors=errors)
    except (OSError, UserError):
        return ""


def system_link(path: str | Path) -> str:
    """Return the target of a symbolic link, such as one in /proc; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def command_line(pid: int) -> str:
    """Return the command line of a process, joined by spaces; empty if the process has exited."""
    return system_text(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")


@functools.cache
def processor_id() -> str:
    """Return a short hash of the processor's model and instruction sets."""
    import hashlib  # loads OpenSSL, which most commands do not need

    first = takewhile(str.strip, system_text("/proc/cpuinfo").splitlines(keepends=True))
    lines = {line.split(":")[0].strip(): line for line in first}
    if not lines:
        return platform.processor() or "unknown"
    identity = "".join(lines.get(key, "") for key in ("model name", "flags", "Features", "CPU part"))
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


class Answer(NamedTuple):
    """Output of a command, or the reason why it failed if `text` is None."""

    text: str | None
    complaint: str = ""


def ask_command(words: Sequence[str], env: Mapping[str, str], limit_s: float, tries: int = 1) -> Answer:
    """Run a command and return its output, with a timeout of `limit_s` per try. Empty output is a failure, too.

    Schedulers under load often reply on the second try. Only programs on the PATH of `env` are run.
    """
    # Imported here because most processes that read files run no command.
    import shutil
    import subprocess

    program = shutil.which(words[0], path=env.get("PATH", ""))
    if program is None:
        return Answer(None, f"{words[0]} is not on PATH")
    complaint = ""
    for attempt in range(tries):
        time.sleep(_BETWEEN_TRIES_S if attempt else 0)
        try:
            done = subprocess.run([program, *words[1:]], env=dict(env), stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            complaint = f"no reply within {limit_s:g} s"
            continue
        except OSError as error:
            complaint = str(error)
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Answer(done.stdout.decode(errors="replace"))
        stderr_lines = done.stderr.decode(errors="replace").strip().splitlines()
        complaint = f"exit code {done.returncode}" + (f", {stderr_lines[-1]!r}" if stderr_lines else ", no output")
    return Answer(None, f"`{shlex.join(words)}` failed: {complaint}")
