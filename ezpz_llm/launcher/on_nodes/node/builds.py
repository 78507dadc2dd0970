"""Locks of extension builds, such as DeepSpeed's ops, which ranks compile on first use.

torch keeps a file `lock` in the extension's folder during a build. If the builder is killed, the file stays, and
later runs wait for it without a message.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import system_link
from ezpz_llm.launcher.basics.processes import Process
from ezpz_llm.launcher.basics.variables import EXTENSIONS_VARIABLE

_BUILDER = "ninja"
"""Program with which torch compiles an extension; its working directory is the extension's folder."""
_LOCK = "lock"
_FOLDER = re.compile(r"\bUsing (/.+) as PyTorch extensions root")
"""Message of torch.utils.cpp_extension in verbose mode, which DeepSpeed uses for its ops."""


@dataclass(frozen=True)
class Lock:
    """Lock file of an extension build. `worker` is the process on this node that is building, if any."""

    path: Path
    age_s: float
    worker: int | None

    def __str__(self) -> str:
        name, minutes = self.path.parent.name, self.age_s / 60
        if self.worker is not None:
            return f"{name} has been compiling for {minutes:.0f} min (process {self.worker}); other ranks wait"
        return (f"{name}: the build lock is {minutes:.0f} min old, and no process on this node is compiling it; if"
                f" no process on another node is either, remove the lock: rm {shlex.quote(str(self.path))}")


class BuildWatch:
    """Locks of extension builds that ranks of this node were seen running."""

    def __init__(self) -> None:
        self._locks: dict[Path, tuple[int, int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the extensions that were seen compiling."""
        return tuple(lock.parent.name for lock in self._locks)

    def update(self, processes: Iterable[Process]) -> bool:
        """Record builds in progress; return True if there is a new one."""
        count = len(self._locks)
        for process in processes:
            if process.is_of_rank and process.name == _BUILDER:
                with contextlib.suppress(OSError):
                    lock = Path(os.readlink(f"/proc/{process.pid}/cwd")) / _LOCK
                    self._locks[lock] = _identity(lock)
        return len(self._locks) > count

    def remove_locks(self) -> None:
        """Remove the recorded locks that are unchanged. Call it after the ranks have ended."""
        for lock, identity in self._locks.items():
            with contextlib.suppress(OSError):
                if _identity(lock) == identity:
                    lock.unlink()


def find_locks(env: Mapping[str, str], output: Iterable[str] = ()) -> list[Lock]:
    """Return the locks in all folders where ranks compile extensions.

    The folders come from the variable that launch (`env`) or the user set, and from torch's messages in `output`.
    """
    from_env = env.get(EXTENSIONS_VARIABLE) or os.environ.get(EXTENSIONS_VARIABLE)
    folders = {*([from_env] if from_env else []), *(match[1] for line in output if (match := _FOLDER.search(line)))}
    locks = []
    for path in sorted(path for folder in folders for path in Path(folder).glob(f"*/{_LOCK}")):
        with contextlib.suppress(OSError):
            locks.append(Lock(path, max(0.0, time.time() - path.stat().st_mtime), _worker_in(path.parent)))
    return locks


def _worker_in(folder: Path) -> int | None:
    workers = (int(pid) for pid in os.listdir("/proc")
               if pid.isdigit() and system_link(f"/proc/{pid}/cwd") == str(folder.resolve()))
    return next(workers, None)


def _identity(lock: Path) -> tuple[int, int]:
    status = lock.stat()
    return status.st_ino, status.st_mtime_ns
