"""Writer of metrics, the record, plots and profiles; a failed write does not stop training.

If a file cannot be written (a full disk, a removed directory, a file system that fails for a minute), one warning
is printed. The content is kept in memory, and a thread retries the write.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import UserError, count_noun, print_lines
from ezpz_llm.core.rundir.files import RunDir, append_lines, json_text, write_atomic

MAX_WAITING = 100_000
"""Limit on pending lines and writes per path, about 50 MB of metrics. Further ones are dropped."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_END_WITHIN_S = 5.0
"""Longest wait for a hanging write at the end of a run."""


class _Write(NamedTuple):
    write: Callable[[], None]
    values: Sequence[Any]
    """Lines to append; empty if the write replaces the file."""

    @property
    def lines(self) -> int:
        return len(self.values) or 1


class _Pending:
    """Pending writes to a path, in order, since the first failed write."""

    def __init__(self, reason: str, job: _Write) -> None:
        self.reason = reason
        self.since = time.monotonic()
        self.jobs = deque([job])
        self.lost = 0


class SideFiles:
    """Writer of files that training does not depend on.

    A write happens at once in the calling thread, unless earlier writes to the path are pending. A thread retries
    failed writes, so that no step waits for them. `close` retries one last time.
    """

    def __init__(self, say: Callable[[str], None] | None = None, first_retry_s: float = _FIRST_RETRY_S) -> None:
        self._say = say or _print_to_stderr
        self._first_retry_s = first_retry_s
        self._lock = threading.Lock()
        self._waiting: dict[Path, _Pending] = {}
        self._failing: set[str] = set()
        self._lost: list[str] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def append(self, path: Path, values: Sequence[Any]) -> None:
        """Append each value as a line of JSON."""
        self._put(path, _Write(lambda: append_lines(path, values), values))

    def write(self, path: Path, content: str | bytes) -> None:
        """Replace a file."""
        def write() -> None:
            # Creates a missing folder of the run directory, but not the run directory itself.
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)

        self._put(path, _Write(write, ()))

    def write_json(self, path: Path, value: Any) -> None:
        """Replace a file with `value` as indented JSON."""
        self.write(path, json_text(value))

    def update_record(self, run_dir: RunDir, **members: Any) -> None:
        """Set members of run.json."""
        from ezpz_llm.core.rundir.records import update_record  # not needed by the shims, which import this package

        self._put(run_dir.record, _Write(lambda: update_record(run_dir, **members), ()))

    def attempt(self, what: str, action: Callable[[], object]) -> None:
        """Run an action that cannot be retried. Warn about the first of consecutive failures."""
        try:
            action()
        except Exception as error:  # profilers raise their own types
            if what not in self._failing:
                self._failing.add(what)
                self._lost.append(f"{what} could not be written: {_reason(error)}")
                self._say(f"warning: {self._lost[-1]}; training continues")
        else:
            self._failing.discard(what)

    def waiting(self, path: Path) -> list[Any]:
        """Return the values whose lines are not yet in the file."""
        with self._lock:
            pending = self._waiting.get(path)
            return [value for job in pending.jobs for value in job.values] if pending else []

    def close(self) -> list[str]:
        """Retry pending writes one last time. Return messages about lost content."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)
            if not self._thread.is_alive():
                self._retry()
        for path, pending in self._waiting.items():
            count = pending.lost + sum(job.lines for job in pending.jobs)
            self._lost.append(f"{_describe(path, count)} could not be written: {pending.reason}")
        self._waiting = {}
        lost, self._lost = self._lost, []
        return lost

    def _put(self, path: Path, job: _Write) -> None:
        with self._lock:
            pending = self._waiting.get(path)
            if pending is not None:
                if sum(earlier.lines for earlier in pending.jobs) + job.lines > MAX_WAITING:
                    pending.lost += job.lines
                else:
                    pending.jobs.append(job)
                return
        try:
            job.write()
        except (OSError, UserError) as error:
            with self._lock:
                self._waiting[path] = _Pending(_reason(error), job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._keep_trying, name="side files", daemon=True)
                    self._thread.start()
            self._say(f"warning: {path} cannot be written: {_reason(error)}\n"
                      "  training continues; the content is kept in memory, and the write is retried")

    def _keep_trying(self) -> None:
        pause = self._first_retry_s
        while not self._closing.wait(pause):
            pause = self._first_retry_s if self._retry() else min(2 * pause, _LONGEST_RETRY_S)

    def _retry(self) -> bool:
        """Retry each path's writes in order. Return True if no writes are pending."""
        for path, pending in list(self._waiting.items()):
            while pending.jobs:
                try:
                    pending.jobs[0].write()
                except (OSError, UserError) as error:
                    pending.reason = _reason(error)
                    break
                with self._lock:
                    pending.jobs.popleft()
                    if not pending.jobs:
                        del self._waiting[path]
            else:
                self._say(f"note: {path} can be written again, after {time.monotonic() - pending.since:.0f} s")
                if pending.lost:
                    self._lost.append(f"{_describe(path, pending.lost)} could not be kept in memory")
        return not self._waiting


class _LossyFile(io.FileIO):
    """File that drops data that cannot be written. BrokenPipeError is still raised."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write the data, or drop all of it if that fails."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def ignore_print_errors() -> None:
    """Make stdout and stderr drop lines that cannot be written, for example on a full disk, instead of raising."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            lossy = io.BufferedWriter(_LossyFile(number, "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(lossy, stream.encoding, stream.errors,
                                                line_buffering=stream.line_buffering,
                                                write_through=stream.write_through))


def _describe(path: Path, count: int) -> str:
    return f"{count_noun(count, 'line')} of {path}" if path.suffix == ".jsonl" else str(path)


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return error.found
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".rstrip(": ")


def _print_to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be on the full disk too
        print_lines(text, file=sys.stderr)
