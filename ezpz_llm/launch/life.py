"""Signs of life of a running launch, for --timeout-idle."""

from __future__ import annotations

import os
from pathlib import Path

from ezpz_llm.launch.node.processes import marked
from ezpz_llm.rundir.layout import RunDir

BUSY_SHARE = 0.02
"""Less than this share of one core, over all the run's processes on this host, is no sign of life: timers tick in
a rank that hangs, too."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NOT_THE_PROGRAM = b"ezpz_llm.launch.shim"


class SignsOfLife:
    """How long has the run been silent?

    Ranks that beat (heartbeat/) are judged by that alone. Others live while a log grows or while processor time
    is used on this host.
    """

    def __init__(self, run_dir: RunDir, run_id: str, launcher_pid: int, now: float) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._launcher_pid = launcher_pid
        self._last = now
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._cpu_s = 0.0

    def silent_for(self, now: float) -> float:
        """Seconds since the last sign of life; `now` is a monotonic time."""
        beats = _stamps(self._run_dir.path / "heartbeat")
        seen = beats or _stamps(self._run_dir.path / "logs")
        if seen != self._seen or (not beats and self._is_busy(now)):
            self._seen, self._last = seen, now
            self._cpu_s = self._processor_seconds()
        return now - self._last

    def most_silent(self) -> str:
        """Which rank was heard last the longest ago, by what file, and what it said there."""
        for folder, kind in (("heartbeat", "heartbeat"), ("logs", "log")):
            stamps = _stamps(self._run_dir.path / folder)
            if stamps:
                name = min(stamps, key=lambda stamp: stamp[1])[0]
                rank = int("".join(character for character in name if character.isdigit()))
                return f"rank {rank} has been silent longest (its {kind}{_last_words(self._run_dir, rank, kind)})"
        return "no rank has said anything"

    def _is_busy(self, now: float) -> bool:
        return self._processor_seconds() - self._cpu_s > 0.05 + BUSY_SHARE * (now - self._last)

    def _processor_seconds(self) -> float:
        return sum(_processor_seconds(process.pid) for process in marked(self._run_id)
                   if process.pid != self._launcher_pid)


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    found = []
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        if not entry.name.startswith("."):
            found.append((entry.name, status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))


def _last_words(run_dir: RunDir, rank: int, kind: str) -> str:
    path = run_dir.rank_heartbeat(rank) if kind == "heartbeat" else run_dir.rank_log(rank)
    lines = path.read_bytes()[-400:].decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else " is empty"


def _processor_seconds(pid: int) -> float:
    try:
        if _NOT_THE_PROGRAM in Path(f"/proc/{pid}/cmdline").read_bytes():
            return 0.0
        # The command's name, in parentheses, may hold blanks: the numbers begin after it.
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / _TICKS_PER_S
