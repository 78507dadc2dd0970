"""Files written beside training: metrics, the record, plots, profiles. None of them may end a run or hold it up.

A file that cannot be written (a full disk, a directory that was removed, a file system that fails for a minute) is
warned of once; what it was to get is kept in memory and tried again by a thread of its own.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.rundir.files import RunDir, append_lines, json_text, update_record, write_atomic

MOST_WAITING = 100_000
"""Lines and files that are kept for one path, about 50 MB of metrics; what comes after them is lost."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
_END_WITHIN_S = 5.0
"""How long the end of a run waits for a write that hangs."""


@dataclass
class _Waiting:
    """What one path was to get since it failed, in order."""

    why: str
    since: float
    jobs: deque[_Job] = field(default_factory=deque)
    lost: int = 0


@dataclass(frozen=True)
class _Job:
    write: Callable[[], None]
    values: Sequence[Any]
    """Where it appends lines."""

    @property
    def count(self) -> int:
        return len(self.values) or 1


class SideFiles:
    """The files that one process writes beside its training.

    Each is written at once where nothing waits for its path, by the caller; whatever fails is tried again by a
    thread, so that no step waits for that. `close` tries a last time.
    """

    def __init__(self, say: Callable[[str], None] | None = None, first_retry_s: float = FIRST_RETRY_S) -> None:
        self._say = say or _say
        self._first_retry_s = first_retry_s
        self._lock = threading.Lock()
        self._waiting: dict[Path, _Waiting] = {}
        self._failing: set[str] = set()
        self._lost: list[str] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def append(self, path: Path, values: Sequence[Any]) -> None:
        """Append each value as a line of JSON."""
        self._put(path, _Job(lambda: append_lines(path, values), values))

    def write(self, path: Path, content: str | bytes) -> None:
        """Replace a file whole."""
        def write() -> None:
            # A folder of the run directory that is gone is made again; the run directory itself is not.
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)

        self._put(path, _Job(write, ()))

    def write_json(self, path: Path, value: Any) -> None:
        """Replace a file by `value` as indented JSON."""
        self.write(path, json_text(value))

    def update_record(self, run_dir: RunDir, **members: Any) -> None:
        """Set members of run.json."""
        self._put(run_dir.record, _Job(lambda: update_record(run_dir, **members), ()))

    def attempt(self, what: str, action: Callable[[], object]) -> None:
        """Do what only the caller can do, and only now. A failure of any kind is warned of, once until it works
        again."""
        try:
            action()
        except Exception as error:  # profilers have errors of their own
            if what not in self._failing:
                self._failing.add(what)
                self._lost.append(f"{what} could not be written: {_words(error)}")
                self._say(f"warning: {self._lost[-1]}; training continues")
        else:
            self._failing.discard(what)

    def waiting(self, path: Path) -> list[Any]:
        """The lines that a file lacks so far."""
        with self._lock:
            found = self._waiting.get(path)
            return [value for job in found.jobs for value in job.values] if found else []

    def close(self) -> list[str]:
        """Try what still waits a last time; what is lost for good, in words."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)
            if not self._thread.is_alive():
                self._retry()
        for path, found in self._waiting.items():
            count = found.lost + sum(job.count for job in found.jobs)
            self._lost.append(f"{_named(path, count)} could not be written: {found.why}")
        self._waiting = {}
        lost, self._lost = self._lost, []
        return lost

    def _put(self, path: Path, job: _Job) -> None:
        with self._lock:
            found = self._waiting.get(path)
            if found is not None:
                if sum(one.count for one in found.jobs) + job.count > MOST_WAITING:
                    found.lost += job.count
                else:
                    found.jobs.append(job)
                return
        try:
            job.write()
        except (OSError, UserError) as error:
            with self._lock:
                self._waiting[path] = _Waiting(_words(error), time.monotonic(), deque([job]))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._keep_trying, name="side files", daemon=True)
                    self._thread.start()
            self._say(f"warning: {path} cannot be written: {_words(error)}\n"
                      "  training continues; what it lacks is kept in memory and tried again")

    def _keep_trying(self) -> None:
        pause = self._first_retry_s
        while not self._closing.wait(pause):
            pause = self._first_retry_s if self._retry() else min(2 * pause, LONGEST_RETRY_S)

    def _retry(self) -> bool:
        """Try each path's jobs in order; whether none waits any longer."""
        for path, found in list(self._waiting.items()):
            written = 0
            while found.jobs:
                try:
                    found.jobs[0].write()
                except (OSError, UserError) as error:
                    found.why = _words(error)
                    break
                with self._lock:
                    written += found.jobs.popleft().count
                    if not found.jobs:
                        del self._waiting[path]
            else:
                self._say(f"note: {path} is written again, after {time.monotonic() - found.since:.0f} s")
                if found.lost:
                    self._lost.append(f"{_named(path, found.lost)} could not be kept in memory")
        return not self._waiting


class _Lossy(io.FileIO):
    """A descriptor that loses what its file cannot take; a reader who has gone is told of."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def print_whatever_happens() -> None:
    """From now on standard output and error into a file on a full disk, say, lose lines rather than end a run."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            lossy = io.BufferedWriter(_Lossy(number, "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(lossy, stream.encoding, stream.errors,
                                                line_buffering=stream.line_buffering,
                                                write_through=stream.write_through))


def _named(path: Path, count: int) -> str:
    return f"{count} lines of {path}" if path.suffix == ".jsonl" else str(path)


def _words(error: Exception) -> str:
    if isinstance(error, UserError):
        return error.found
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".rstrip(": ")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be such a file itself
        print(text, file=sys.stderr, flush=True)
