"""Console of launch: its own lines, and what the launcher writes.

The launcher writes into pipes that are read to their ends whatever becomes of the console: a reader that goes away
(`| head -1`, a tee that Ctrl-C ended, a closed terminal) must not reach the launcher, whose SIGPIPE would end all
ranks before they have saved their work. The ranks' logs have what nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, BinaryIO, cast

from ezpz_llm.base import cleaned
from ezpz_llm.rundir import RunDir, ours


# What launch itself says on standard error. That nobody reads it (any more) ends nothing.
def say(text: str) -> None:
    """Print lines, as far as somebody reads them, cleaned: hosts, paths and rank output are in them."""
    try:
        # One write, line end included, so that a rank's output cannot come in between.
        sys.stderr.write(f"{cleaned(text)}\n")
        sys.stderr.flush()
    except OSError:
        # EPIPE: the reader of `launch … 2>&1 | tee` has gone. EIO: the terminal was closed.
        leave(2)


def say_unless_it_waits(text: str) -> None:
    """The same, unless the console takes nothing just now: a stop must not wait for a stuck reader."""
    with contextlib.suppress(OSError):
        # A pipe is ready for a line that it takes whole.
        if select.select([], [2], [], 0)[1]:
            say(text)


def warn(text: str) -> None:
    """A line for the user that changes nothing about the run's outcome."""
    say(f"launch: warning: {text}")


def leave(descriptor: int) -> None:
    """Send to nothing what is still to be written there: Python's own last flush would change the exit code."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def are_one_place(descriptor: int, other: int) -> bool:
    """Do both lead to the same terminal, file or pipe?"""
    try:
        return os.path.sameopenfile(descriptor, other)
    except OSError:
        return False


_PIECE_BYTES = 1 << 16
_WAITING_BYTES = 1 << 20
"""More than this that the console has not taken makes the ranks wait, as a pipe without us would."""
_DRAIN_S = 1.0
_POLL_S = 0.05


class Relay:
    """The launcher's standard output and standard error, passed on as they come; the latter is also kept."""

    def __init__(self, launcher: subprocess.Popen[bytes], run_dir: RunDir) -> None:
        self._log = log = os.fdopen(
            ours(str(run_dir.launcher_log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0)

        def gone(why: str) -> None:
            if not self._is_ending:
                note = f"launch: {why}; the run continues, and its output is in {run_dir.rank_log(0).parent}"
                with contextlib.suppress(OSError):
                    log.write(f"{note}\n".encode(errors="replace"))
                say(note)

        self._is_ending = False
        out, err = cast("tuple[IO[bytes], IO[bytes]]", (launcher.stdout, launcher.stderr))
        self._streams = _Stream(out.fileno(), 1, None, gone), _Stream(err.fileno(), 2, log, lambda why: None)

    def keep(self, words: str) -> None:
        """Add to the launcher's words what was said elsewhere about the run's end."""
        with contextlib.suppress(OSError):
            self._log.write(words.encode(errors="replace"))

    def hold_nobody_up(self) -> None:
        """The run is ended: ranks that wait for the console cannot save, so what it does not take is dropped."""
        self._is_ending = True
        for stream in self._streams:
            stream.drop_what_waits()

    def settle(self) -> None:
        """After the launcher's end: read and keep what is still there; a process that has kept a pipe open is not
        waited for."""
        self._is_ending = True
        deadline = time.monotonic() + _DRAIN_S
        for stream in self._streams:
            stream.read_to_the_end(max(0.0, deadline - time.monotonic()))

    def finish(self, is_urgent: Callable[[], bool]) -> bool:
        """After `settle`: wait until the console has taken all of it, unless that is urgent. Did it?"""
        while not (is_done := all(stream.is_shown for stream in self._streams)) and not is_urgent():
            time.sleep(_POLL_S)
        return is_done

    @property
    def is_within_a_line(self) -> bool:
        """Does what was shown last, on either stream, lack its line's end?"""
        return any(stream.is_within_a_line for stream in self._streams)


class _Stream:
    """One pipe. One thread reads it, another writes to the console, which may block without blocking the first."""

    def __init__(self, source: int, console: int, log: BinaryIO | None, gone: Callable[[str], None]) -> None:
        self.is_within_a_line = False
        self._source, self._console, self._log, self._gone = source, console, log, gone
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._most_bytes: float = _WAITING_BYTES
        self._drops = False
        self._is_over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader.start()
        self._writer.start()

    def drop_what_waits(self) -> None:
        with self._changed:
            self._drops = True
            self._changed.notify_all()

    def read_to_the_end(self, within_s: float) -> None:
        with self._changed:
            # What a pipe holds is little: it need not wait for the console.
            self._most_bytes, self._drops = float("inf"), False
            self._changed.notify_all()
        self._reader.join(within_s)
        self._end()

    @property
    def is_shown(self) -> bool:
        return not self._writer.is_alive()

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read(self) -> None:
        while data := os.read(self._source, _PIECE_BYTES):
            if self._log is not None:
                with contextlib.suppress(OSError):
                    # A full disk must not stop the run's words.
                    self._log.write(data)
            with self._changed:
                while self._bytes > self._most_bytes and not self._drops:
                    self._changed.wait()
                if self._bytes <= self._most_bytes:
                    self._pieces.append(data)
                    self._bytes += len(data)
                    self._changed.notify_all()
        self._end()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._pieces and not self._is_over:
                    self._changed.wait()
                if not self._pieces:
                    return
                data = self._pieces.popleft()
            self._show(data)
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()

    def _show(self, data: bytes) -> None:
        self.is_within_a_line = not data.endswith(b"\n")
        try:
            while data:
                data = data[os.write(self._console, data):]
        except OSError as error:
            self.is_within_a_line = False
            leave(self._console)
            self._gone("nobody reads standard output any more" if isinstance(error, BrokenPipeError) else
                       f"standard output cannot be written to: {error.strerror}")
