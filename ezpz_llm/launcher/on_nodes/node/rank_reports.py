"""Reports about one node's ranks, from heartbeats, logs and CPU time; dumps of their Python and kernel stacks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import PrivateFolder, ask_command, command_line, system_link, system_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.messages import RankReport
from ezpz_llm.launcher.basics.node_folder import (
    END_MARK,
    HEARTBEAT,
    LOG,
    file_of,
    parse_heartbeat,
    registered_ranks,
)
from ezpz_llm.launcher.basics.processes import Process, find_ancestor, has_signal_handler
from ezpz_llm.launcher.basics.variables import STACKS_SIGNAL, STACKS_VARIABLE

_BUSY_SHARE = 0.02
"""Share of one core below which a rank is considered idle; not 0, since timer threads run even in a hung rank."""
_MIN_BUSY_S = 0.05
_HEARTBEAT_BYTES = 4096


@dataclass
class _Life:
    """Last signs of life of one rank. Times are in monotonic seconds."""

    active_at: float
    cpu_s: float = 0.0
    log: tuple[int, int] = (-1, 0)
    heartbeat_stamp: int | None = None
    heartbeat_at: float = 0.0
    phase_and_step: tuple[str | None, int | None] = (None, None)
    has_ended_before: bool = False
    is_stopped: bool = False


class Gatherer:
    """Collector of rank reports. Ages are measured from observed changes, not from timestamps of files."""

    def __init__(self, folder: PrivateFolder, run_dir: RunDir) -> None:
        self._folder = folder
        self._run_dir = run_dir
        self._lives: dict[int, _Life] = {}

    def update(self, processes: list[Process]) -> tuple[dict[int, RankReport], bool]:
        """Return the reports of all ranks on this node, and True if any rank changed since the last call.

        A rank changes if it appears, is active, is stopped or continued, or ends.
        """
        now = time.monotonic()
        reports = {rank: self._report(rank, [process for process in processes if process.rank == rank], now)
                   for rank in sorted(registered_ranks(self._folder))}
        return {rank: report for rank, (report, _) in reports.items()}, any(news for _, news in reports.values())

    def _report(self, rank: int, processes: list[Process], now: float) -> tuple[RankReport, bool]:
        is_new = rank not in self._lives
        life = self._lives.setdefault(rank, _Life(now))
        ended, lived_s, error = self._read_end(rank)
        is_busy = self._is_busy(life, rank, processes, now)
        if is_busy:
            life.active_at = now
        phase, step, has_new_heartbeat = self._read_heartbeat(life, rank, now)
        main = find_ancestor(processes) if processes else None
        report = RankReport(
            pid=main.pid if main else None, phase=phase, step=step,
            silent_s=round(now - life.heartbeat_at, 1) if life.heartbeat_stamp is not None else None,
            idle_s=round(now - life.active_at, 1), state=main.state if main else None, ended=ended,
            lived_s=lived_s, error=error)
        was_stopped, life.is_stopped = life.is_stopped, report.state == "T"
        has_ended, life.has_ended_before = ended is not None and not life.has_ended_before, ended is not None
        return report, has_ended or (ended is None and (
            is_new or is_busy or has_new_heartbeat or life.is_stopped != was_stopped))

    def _is_busy(self, life: _Life, rank: int, processes: list[Process], now: float) -> bool:
        cpu_s = sum(process.processor_s for process in processes)
        log = self._log_status(rank)
        has_written = log != life.log
        # If a process ends without its parent waiting for it, its CPU time drops out of the sum: continue from the
        # smaller sum.
        worked = cpu_s < life.cpu_s or (
            cpu_s - life.cpu_s > _MIN_BUSY_S + _BUSY_SHARE * (now - life.active_at))
        if has_written or worked:
            life.log, life.cpu_s = log, cpu_s
        return has_written or worked

    def _read_heartbeat(self, life: _Life, rank: int, now: float) -> tuple[str | None, int | None, bool]:
        name = file_of(rank, HEARTBEAT)
        try:
            stamp = self._folder.stat(name).st_mtime_ns
            text = self._folder.read(name, _HEARTBEAT_BYTES).decode(errors="replace")
        except OSError:
            return *life.phase_and_step, False
        has_new_heartbeat = stamp != life.heartbeat_stamp
        if has_new_heartbeat:
            life.heartbeat_stamp, life.heartbeat_at = stamp, now
        # While the rank writes the file, it may be empty or its line incomplete.
        if text.endswith("\n"):
            life.phase_and_step = parse_heartbeat(text)
        return *life.phase_and_step, has_new_heartbeat

    def _read_end(self, rank: int) -> tuple[int | None, float | None, str]:
        """Return exit code, lifetime, and unrecorded error of a rank; (None, None, "") if it has not ended.

        An empty end mark counts as exit code 0.
        """
        try:
            code, lived_s, error = (self._folder.read(file_of(rank, END_MARK)).decode() or "0 0 ").split(" ", 2)
            return int(code), float(lived_s), error
        except (OSError, ValueError):
            return None, None, ""

    def _log_status(self, rank: int) -> tuple[int, int]:
        """Return total size and latest modification time of the rank's logs in the run directory and on the node.

        A log that has reached its size limit no longer grows, but its modification time changes.
        """
        size = changed = 0
        for stat in (self._run_dir.rank_log(rank).stat, lambda: self._folder.stat(file_of(rank, LOG))):
            with contextlib.suppress(OSError):
                status = stat()
                size, changed = size + status.st_size, max(changed, status.st_mtime_ns)
        return size, changed


_PY_SPY_TIMEOUT_S = 10.0
_HANDLER_TIMEOUT_S = 3.0
_MAX_PROCESSES = 8
_NO_STACK = f"""\
  no Python stack: py-spy is not installed or not permitted, and the program has not registered a fault handler.
  Run `pip install py-spy`, or add to the program:
    import faulthandler, os
    faulthandler.register({STACKS_SIGNAL}, open(os.environ["{STACKS_VARIABLE}"], "a"))
"""


def format_stacks(heading: str, processes: Sequence[Process], handler_output: Path) -> str:
    """Return the text of a stacks file: each process's Python stacks, if available, and its state in the kernel.

    Args:
        heading: its first line.
        processes: the rank's processes; the stacks of at most eight are included.
        handler_output: the file to which the rank's fault handler writes.
    """
    if not processes:
        return f"{heading}\nno process of this rank is left\n"
    main = find_ancestor(list(processes))
    in_order = [main, *sorted((process for process in processes if process is not main),
                              key=lambda process: process.pid)]
    parts = [heading, *(_format_process(process, handler_output) for process in in_order[:_MAX_PROCESSES])]
    if len(processes) > _MAX_PROCESSES:
        parts.append(f"… and {len(processes) - _MAX_PROCESSES} more processes\n")
    return "\n".join(parts)


def _format_process(process: Process, handler_output: Path) -> str:
    text = f"process {process.pid}: {command_line(process.pid) or '(it has ended)'}\n{_kernel_state(process.pid)}"
    if not os.path.basename(system_link(f"/proc/{process.pid}/exe")).startswith("python"):
        return text
    stacks = _stack_from_py_spy(process.pid) or _stack_from_fault_handler(process.pid, handler_output)
    return text + (stacks or _NO_STACK)


def _stack_from_py_spy(pid: int) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
    command = ["py-spy", "dump", "--full-filenames", "--pid", str(pid)]
    return ask_command(command, {**os.environ, "PATH": path}, _PY_SPY_TIMEOUT_S).text


def _stack_from_fault_handler(pid: int, handler_output: Path) -> str | None:
    if not has_signal_handler(pid, STACKS_SIGNAL):
        return None
    before = _size(handler_output)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return None
    deadline, size = time.monotonic() + _HANDLER_TIMEOUT_S, before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        last, size = size, _size(handler_output)
        if size > before and size == last:
            return handler_output.read_bytes()[before:].decode(errors="replace")
    return None


def _kernel_state(pid: int) -> str:
    """Return a process's state, wait channel and kernel stack, as far as they are readable."""
    lines = []
    for name, pattern in (("status", re.compile(r"^(State|Threads|VmRSS):")), ("wchan", None), ("stack", None)):
        content = system_text(f"/proc/{pid}/{name}").strip().splitlines()
        lines += [f"  {line}" if pattern else f"  {name}: {line}" for line in content
                  if line not in ("", "0") and (pattern is None or pattern.match(line))]
    return "".join(f"{line}\n" for line in lines)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
