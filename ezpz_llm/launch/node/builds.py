"""Extensions that ranks compile on first use, such as DeepSpeed's ops. torch holds a file `lock` in the extension's
folder meanwhile, and leaves it where the builder is killed: every later run would wait for it without a word."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import system_link
from ezpz_llm.launch.node.processes import Process
from ezpz_llm.launch.variables import EXTENSIONS_VARIABLE

_BUILDER = "ninja"
"""What torch has compile an extension, in the extension's own folder."""
_LOCK = "lock"
_FOLDER = re.compile(r"\bUsing (/.+) as PyTorch extensions root")
"""torch.utils.cpp_extension's words, where it is to be verbose, as for DeepSpeed's ops."""


@dataclass(frozen=True)
class Lock:
    """A lock in an extensions folder. `worker` is a process of this host that is at work there, if one is."""

    path: Path
    age_s: float
    worker: int | None

    def __str__(self) -> str:
        name, minutes = self.path.parent.name, self.age_s / 60
        if self.worker is not None:
            return f"{name} has been compiling for {minutes:.0f} min (process {self.worker}); others wait for it"
        return (f"{name}: the lock of a build is {minutes:.0f} min old, and no process of this host works on it;"
                f" where none does on another, remove it: rm {shlex.quote(str(self.path))}")


class BuildWatch:
    """Remembers the locks under which ranks of this node were seen to compile."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What has been compiled, or is."""
        return tuple(lock.parent.name for lock in self._seen)

    def look(self, processes: Iterable[Process]) -> bool:
        """Take note of builds that are under way; True where one is new."""
        before = len(self._seen)
        for process in processes:
            if process.is_of_rank and process.name == _BUILDER:
                with contextlib.suppress(OSError):
                    lock = Path(os.readlink(f"/proc/{process.pid}/cwd")) / _LOCK
                    self._seen[lock] = _identity(lock)
        return len(self._seen) > before

    def clear(self) -> None:
        """Remove these very locks, now that the ranks have ended."""
        for lock, identity in self._seen.items():
            with contextlib.suppress(OSError):
                if _identity(lock) == identity:
                    lock.unlink()


def locks_of(env: Mapping[str, str], output: Iterable[str] = ()) -> list[Lock]:
    """The locks of all extensions where ranks compile them: by what launch set for them (`env`) or the user did,
    and by what torch says of it in lines of their `output`."""
    named = env.get(EXTENSIONS_VARIABLE) or os.environ.get(EXTENSIONS_VARIABLE)
    folders = {*([named] if named else []), *(match[1] for line in output if (match := _FOLDER.search(line)))}
    found = []
    for path in sorted(path for folder in folders for path in Path(folder).glob(f"*/{_LOCK}")):
        with contextlib.suppress(OSError):
            found.append(Lock(path, max(0.0, time.time() - path.stat().st_mtime), _worker_in(path.parent)))
    return found


def _worker_in(folder: Path) -> int | None:
    at_work = (int(pid) for pid in os.listdir("/proc")
               if pid.isdigit() and system_link(f"/proc/{pid}/cwd") == str(folder.resolve()))
    return next(at_work, None)


def _identity(lock: Path) -> tuple[int, int]:
    found = lock.stat()
    return found.st_ino, found.st_mtime_ns
