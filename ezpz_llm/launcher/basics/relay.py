"""Console output of launch: its own lines, and the relayed output of the launcher.

launch reads the launcher's pipes to the end even if the console is closed (`| head -1`, a tee that Ctrl-C ended,
a closed terminal). Otherwise SIGPIPE would end the launcher, and all ranks with it, before they have saved their
work.
The ranks' logs keep output that the console does not show.
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

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, escape_control_characters
from ezpz_llm.core.rundir import RunDir, private_opener
from ezpz_llm.launcher.basics.program_output import MarkReader


def print_stderr(text: str) -> None:
    """Print lines to standard error, with control characters escaped; ignore a closed standard error."""
    try:
        # A single write with the newline, so that output of a rank cannot come in between.
        sys.stderr.write(f"{escape_control_characters(text)}\n")
        sys.stderr.flush()
    except OSError:
        # EPIPE: the reader of `launch … 2>&1 | tee` has exited. EIO: the terminal was closed.
        _redirect_to_null(2)


def print_unless_blocked(text: str) -> None:
    """Print lines unless that would block: stopping a run must not wait for a stuck reader."""
    with contextlib.suppress(OSError):
        # select() reports a pipe as writable only if it has room for a whole line (PIPE_BUF).
        if select.select([], [2], [], 0)[1]:
            print_stderr(text)


def warn(text: str) -> None:
    """Print a warning, which does not affect the outcome of the run."""
    print_stderr(f"launch: warning: {text}")


def _redirect_to_null(descriptor: int) -> None:
    """Redirect a closed descriptor to /dev/null: Python's flush at exit would otherwise change the exit code."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def is_same_file(descriptor: int, other: int) -> bool:
    """Return True if both descriptors refer to the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(descriptor, other)
    except OSError:
        return False


_PIECE_BYTES = 1 << 16
_MAX_PENDING_BYTES = 1 << 20
"""Limit on output that the console has not accepted yet; beyond it the ranks block, as they would on a pipe."""
_DRAIN_S = 1.0
_POLL_S = 0.05


class Relay:
    """Relay of the launcher's standard output and standard error to the console.

    The launcher's own lines on standard error, which no rank has printed, are also logged.

    Raises:
        UserError: the log is not a regular file, or cannot be written.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], run_dir: RunDir) -> None:
        try:
            handle = private_opener(str(run_dir.launcher_log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise UserError(f"cannot write the launcher's log: {error.strerror}", where=str(run_dir.launcher_log),
                            instead="remove it, or use another --run-dir", exit_code=EXIT_PREFLIGHT) from error
        self._log = log = os.fdopen(handle, "wb", buffering=0)

        def report_closed(reason: str) -> None:
            """Note in the log and on the console that standard output can no longer be shown."""
            if not self._is_ending:
                note = f"launch: {reason}; the run continues, and its output is in {run_dir.rank_log(0).parent}"
                with contextlib.suppress(OSError):
                    log.write(f"{note}\n".encode(errors="replace"))
                print_stderr(note)

        self._is_ending = False
        out, err = cast("tuple[IO[bytes], IO[bytes]]", (launcher.stdout, launcher.stderr))
        self._streams = (_Stream(out.fileno(), 1, None, report_closed),
                         _Stream(err.fileno(), 2, log, lambda reason: None))

    def append_to_log(self, text: str) -> None:
        """Append text about the end of the run to the launcher's log."""
        with contextlib.suppress(OSError):
            self._log.write(text.encode(errors="replace"))

    def stop_blocking(self) -> None:
        """Drop output that the console does not accept: ranks that block on it cannot save before they end."""
        self._is_ending = True
        for stream in self._streams:
            stream.drop_pending()

    def read_rest(self) -> None:
        """Read the remaining output of the launcher, which has ended, for at most 1 s.

        A process that keeps a pipe open would otherwise block launch.
        """
        self._is_ending = True
        deadline = time.monotonic() + _DRAIN_S
        for stream in self._streams:
            stream.read_to_the_end(max(0.0, deadline - time.monotonic()))

    def wait_until_shown(self, is_urgent: Callable[[], bool]) -> bool:
        """After `read_rest`, wait until the console has all output; return False if `is_urgent` ended the wait."""
        while not (is_done := all(stream.is_shown for stream in self._streams)) and not is_urgent():
            time.sleep(_POLL_S)
        return is_done

    @property
    def is_within_a_line(self) -> bool:
        """True if the last output on either stream did not end with a newline."""
        return any(stream.is_within_a_line for stream in self._streams)


class _Stream:
    """Relay of a pipe, with a thread that reads it and a thread that writes to the console and may block."""

    def __init__(self, source: int, console: int, log: BinaryIO | None, on_closed: Callable[[str], None]) -> None:
        self.is_within_a_line = False
        self._source, self._console, self._log, self._on_closed = source, console, log, on_closed
        self._marks = MarkReader()
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._maximum_bytes: float = _MAX_PENDING_BYTES
        self._is_dropping = False
        self._has_ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader.start()
        self._writer.start()

    def drop_pending(self) -> None:
        with self._changed:
            self._is_dropping = True
            self._changed.notify_all()

    def read_to_the_end(self, within_s: float) -> None:
        """Read what is left in the pipe, for at most `within_s` seconds, and end the stream."""
        with self._changed:
            # A pipe holds little: read it without waiting for the console.
            self._maximum_bytes, self._is_dropping = float("inf"), False
            self._changed.notify_all()
        self._reader.join(within_s)
        self._mark_ended()

    @property
    def is_shown(self) -> bool:
        return not self._writer.is_alive()

    def _mark_ended(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        while data := os.read(self._source, _PIECE_BYTES):
            if self._log is not None:
                data, of_launcher = self._marks.split(data)
                with contextlib.suppress(OSError):
                    # A full disk must not stop the console output.
                    self._log.write(of_launcher)
            self._show(data)
        self._show(self._marks.rest())
        self._mark_ended()

    def _show(self, data: bytes) -> None:
        with self._changed:
            while self._bytes > self._maximum_bytes and not self._is_dropping:
                self._changed.wait()
            if self._bytes <= self._maximum_bytes:
                self._pieces.append(data)
                self._bytes += len(data)
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._pieces and not self._has_ended:
                    self._changed.wait()
                if not self._pieces:
                    return
                data = self._pieces.popleft()
            self._write_to_console(data)
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()

    def _write_to_console(self, data: bytes) -> None:
        self.is_within_a_line = not data.endswith(b"\n")
        try:
            while data:
                data = data[os.write(self._console, data):]
        except OSError as error:
            self.is_within_a_line = False
            _redirect_to_null(self._console)
            self._on_closed("the reader of standard output has exited" if isinstance(error, BrokenPipeError) else
                            f"standard output cannot be written to: {error.strerror}")
