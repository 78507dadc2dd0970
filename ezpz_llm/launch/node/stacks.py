"""What a rank is doing right now, written down: its Python stacks, if they can be had, and what the kernel says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.launch.node.processes import Process, catches, first_of
from ezpz_llm.launch.variables import STACKS_SIGNAL

_PY_SPY_TIMEOUT_S = 10.0
_HANDLER_TIMEOUT_S = 3.0
_MOST_PROCESSES = 8


def describe(heading: str, own: Sequence[Process], answers: Path) -> str:
    """The text of a stacks file.

    Args:
        heading: its first line.
        own: the rank's processes; the first eight are looked into.
        answers: the file that the rank's fault handler writes into.
    """
    if not own:
        return f"{heading}\nno process of this rank is left\n"
    main = first_of(list(own))
    in_order = [main, *sorted((one for one in own if one is not main), key=lambda one: one.pid)]
    parts = [heading, *(_one(process, answers) for process in in_order[:_MOST_PROCESSES])]
    if len(own) > _MOST_PROCESSES:
        parts.append(f"… and {len(own) - _MOST_PROCESSES} more processes\n")
    return "\n".join(parts)


def _one(process: Process, answers: Path) -> str:
    text = f"process {process.pid}: {_command_line(process.pid)}\n{_kernel_says(process.pid)}"
    if not _is_python(process.pid):
        return text
    stacks = _by_py_spy(process.pid) or _by_fault_handler(process.pid, answers)
    return text + (stacks or "  (no Python stack: py-spy is not installed or not permitted, and the program has"
                             " registered no fault handler)\n")


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def _by_py_spy(pid: int) -> str | None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return None
    try:
        done = subprocess.run([program, "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=_PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _by_fault_handler(pid: int, answers: Path) -> str | None:
    if not catches(pid, STACKS_SIGNAL):
        return None
    before = _size(answers)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return None
    deadline, size = time.monotonic() + _HANDLER_TIMEOUT_S, before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        last, size = size, _size(answers)
        if size > before and size == last:
            return answers.read_bytes()[before:].decode(errors="replace")
    return None


def _kernel_says(pid: int) -> str:
    """State, what it waits for in the kernel, and the kernel's own stack, as far as they may be read."""
    lines = []
    for name, wanted in (("status", re.compile(r"^(State|Threads|VmRSS):")), ("wchan", None), ("stack", None)):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
        except OSError:
            continue
        found = [line for line in text.splitlines() if wanted is None or wanted.match(line)]
        lines += [f"  {line}" if wanted else f"  {name}: {line}" for line in found if line not in ("", "0")]
    return "".join(f"{line}\n" for line in lines)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(it has ended)"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
