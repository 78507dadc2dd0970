"""Output of one rank: written to its log and, if requested, the console; the end is also kept in memory."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.core.base import PrivateFolder
from ezpz_llm.core.rundir import RunDir, private_opener
from ezpz_llm.launcher.basics.node_folder import LOG, file_of
from ezpz_llm.launcher.basics.program_output import mark
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.basics.variables import LIVE_LINE, LOG_BYTES_VARIABLE

MANY_RANKS = 256
"""World size above which logs of ranks other than 0 stay on their nodes, and only one rank per node writes a record
when all are ended together: shared file systems cannot handle thousands of new files at once."""

_MAX_LOG_BYTES = 10_000_000_000
_MAX_BYTES_ON_NODE = 1_000_000_000
"""Size limit of all logs that a node keeps in memory."""
_KEPT_BYTES = 1 << 17
_LONGEST_LINE = 1 << 16
_TOUCH_S = 1.0
_DRAIN_S = 0.5
_LONGEST_LIVE_LINE = 1 << 12
_MARK = LIVE_LINE.encode()
_LIVE_LINE = re.compile(re.escape(_MARK) + rb"[^\r\n\x1b]{,%d}\r" % _LONGEST_LIVE_LINE)
_COLOR = re.compile(rb"\x1b\[[0-9;]{,32}m")
_INCOMPLETE = re.compile(rb"(?:%s[^\r\n\x1b]*|\x1b\[[0-9;]{,32}|%s)\Z" % (
    re.escape(_MARK), b"|".join(re.escape(_MARK[:length]) for length in range(len(_MARK) - 1, 0, -1))))
_LINE_ENDS = (b"\n", b"\r")


def open_log(info: RankInfo, run_dir: RunDir, folder: PrivateFolder | None) -> tuple[Path, int]:
    """Open the rank's log for appending; return its path and descriptor.

    Args:
        folder: the node's folder, if it has one.

    Raises:
        OSError: the log cannot be written, or is a symbolic link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    if info.rank and info.world_size > MANY_RANKS and folder is not None:
        name = file_of(info.rank, LOG)
        return folder.path / name, folder.open(name, flags)
    path = run_dir.rank_log(info.rank)
    return path, private_opener(str(path), flags)


def max_log_bytes(info: RankInfo, is_on_node: bool, env: Mapping[str, str]) -> int:
    """Return the size limit of a rank's log, without the end of the output that is always added."""
    if limit := env.get(LOG_BYTES_VARIABLE):
        return int(limit)
    return _MAX_BYTES_ON_NODE // info.local_size if is_on_node else _MAX_LOG_BYTES


class Output:
    """Output of one rank.

    Args:
        log: an open descriptor.
        tee: launch's --tee.
        max_bytes: size limit of the log, so that a program that prints endlessly cannot fill the disk. The end of
            the output is added nevertheless.
        is_colored: True if the rank writes colors for a terminal, which are removed from the log.
    """

    def __init__(self, rank: int, log: int, tee: str, max_bytes: int = _MAX_LOG_BYTES, *,
                 is_colored: bool = False) -> None:
        self.rank = rank
        self.is_split = tee == "all" or (tee == "0" and rank == 0)
        """True if stdout and stderr have separate pipes."""
        self._log = log
        self._is_colored = is_colored
        self._prefix = f"[{rank}] ".encode() if tee == "all" else None
        self._recent = bytearray()
        self._incomplete = {1: b"", 2: b""}
        self._incomplete_live = {1: b"", 2: b""}
        self._has_console = True
        self._is_within_a_line = False
        self._has_log = True
        self._maximum_bytes = self._remaining_bytes = max_bytes
        self._omitted = 0
        self._touched = 0.0

    def write(self, stream: int, data: bytes) -> None:
        """Process what the rank wrote to `stream` (1 or 2)."""
        permanent, self._incomplete_live[stream] = _without_live_lines(self._incomplete_live[stream] + data)
        self._keep(self._without_colors(permanent))
        if self.is_split and self._prefix is None:
            self._write_to_console(stream, _marked(stream, data))
        elif self.is_split:
            for batch in _batches(self._whole_lines(stream, data)):
                self._write_to_console(stream, batch)

    def close(self) -> None:
        """Write incomplete lines, and add the end of the output to a log that reached its limit."""
        for part in self._incomplete_live.values():
            self._keep(part)
        self._incomplete_live = {1: b"", 2: b""}
        for stream, line in self._incomplete.items():
            if line:
                self._write_to_console(stream, _marked(stream, (self._prefix or b"") + line + b"\n"))
        self._incomplete = {1: b"", 2: b""}
        if self._omitted:
            last = bytes(self._recent[-min(_KEPT_BYTES, self._omitted):])
            self._write_to_log(b"\nlaunch: %d bytes omitted here\n" % (self._omitted - len(last)) + last)
            self._omitted = 0

    def write_message(self, text: str) -> None:
        """Write a line in the shim's own name, to the log and the console."""
        self.write(2, f"launch: {text}\n".encode())

    def tail(self) -> str:
        """Return the end of the output (128 KiB or more, if available); invalid UTF-8 is replaced."""
        return self._recent.decode(errors="replace")

    def make_drain(self, pipes: Sequence[int]) -> tuple[Callable[[], None], tuple[int, ...]]:
        """Return a function with which the janitor copies unread output in the `pipes` to the log.

        The janitor calls it if the shim is killed before it has read all output, as MPI_Abort does. The second
        value is the descriptors that the function needs.
        """

        def drain() -> None:
            """Copy unread output to the log."""
            deadline, unread = time.monotonic() + _DRAIN_S, set(pipes)
            while unread and (remaining_s := deadline - time.monotonic()) > 0:
                for pipe in select.select(unread, (), (), remaining_s)[0]:
                    data = os.read(pipe, 65536)
                    self._write_to_log(self._without_colors(data))
                    if not data:
                        unread.remove(pipe)

        return drain, (*pipes, self._log)

    def _whole_lines(self, stream: int, data: bytes) -> list[bytes]:
        # Lines that end with a carriage return come from progress bars.
        data = self._incomplete[stream] + data
        lines = data.splitlines(keepends=True)
        incomplete = lines.pop() if lines and not lines[-1].endswith(_LINE_ENDS) else b""
        while len(incomplete) > _LONGEST_LINE:
            # A line without an end would be copied again with every read, and slow down the rank.
            lines.append(incomplete[:_LONGEST_LINE])
            incomplete = incomplete[_LONGEST_LINE:]
        self._incomplete[stream] = incomplete
        return [_marked(stream, (self._prefix or b"") + line.rstrip(b"\r\n") + b"\n") for line in lines]

    def _without_colors(self, data: bytes) -> bytes:
        return _COLOR.sub(b"", data) if self._is_colored else data

    def _keep(self, data: bytes) -> None:
        self._recent += data
        if len(self._recent) > 2 * _KEPT_BYTES:
            del self._recent[:-_KEPT_BYTES]
        kept = data[:self._remaining_bytes]
        self._remaining_bytes -= len(kept)
        if kept:
            self._write_to_log(kept)
        if len(kept) == len(data):
            return
        if not self._omitted:
            note = (f"launch: rank {self.rank}'s log has reached its limit of {self._maximum_bytes} bytes"
                    f" ({LOG_BYTES_VARIABLE})")
            self._write_to_log(f"\n{note}\n".encode())
            self._write_to_console_only(f"{note}; the end of the output will still be added")
        self._omitted += len(data) - len(kept)
        if (now := time.monotonic()) > self._touched + _TOUCH_S:
            # The agent reads the modification time to see that the rank still writes.
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self._log)

    def _write_to_console_only(self, note: str) -> None:
        _write(2, (("\n" if self._is_within_a_line else "") + note + "\n").encode())

    def _write_to_log(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._log, data):]
            self._has_log = True
        except OSError as error:
            # A full disk is no reason to end the rank.
            if self._has_log:
                self._has_log = False
                self._write_to_console_only(f"launch: rank {self.rank} continues without its log: {error.strerror}")

    def _write_to_console(self, stream: int, data: bytes) -> None:
        # A closed console (`launch … | head`) does not end the rank; the log continues.
        self._has_console = self._has_console and _write(stream, data)
        self._is_within_a_line = not data.endswith(b"\n")


def _marked(stream: int, data: bytes) -> bytes:
    return mark(data) if stream == 2 else data


def _without_live_lines(data: bytes) -> tuple[bytes, bytes]:
    """Remove live lines, which are for terminals. Return the rest of `data` and its incomplete end.

    The end is an incomplete live line or color code, which the next read may complete.
    """
    permanent = _LIVE_LINE.sub(b"", data)
    incomplete = _INCOMPLETE.search(permanent, max(0, len(permanent) - _LONGEST_LIVE_LINE))
    at = len(permanent) if incomplete is None else incomplete.start()
    return permanent[:at], permanent[at:]


def _batches(lines: list[bytes]) -> Iterator[bytes]:
    """Group lines into pieces of at most PIPE_BUF bytes, so that the launcher reads whole lines."""
    batch = b""
    for line in lines:
        if batch and len(batch) + len(line) > select.PIPE_BUF:
            yield batch
            batch = b""
        batch += line
    if batch:
        yield batch


def _write(descriptor: int, data: bytes) -> bool:
    """Write all of `data`; return False if the reader has closed the descriptor."""
    while data:
        try:
            data = data[os.write(descriptor, data):]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
