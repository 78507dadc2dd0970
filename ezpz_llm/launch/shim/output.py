"""Output of one rank: to its log, to the console if the user wants it there, and the last of it to memory."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ezpz_llm.base import PrivateFolder
from ezpz_llm.launch.node.folder import LOG, file_of
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.variables import LIVE_LINE, LOG_BYTES_VARIABLE
from ezpz_llm.rundir import RunDir, ours

MANY_RANKS = 256
"""In a larger world the logs of ranks other than 0 stay on their nodes, and one rank a node speaks for those
that are ended together: thousands of files at once are more than a shared file system bears."""

_MOST_LOG_BYTES = 10_000_000_000
_MOST_BYTES_ON_NODE = 1_000_000_000
"""Of all logs together that a node keeps, in memory."""
_KEPT_BYTES = 1 << 17
_LONGEST_LINE = 1 << 16
_TOUCH_S = 1.0
_LAST_WORDS_S = 0.5
_LONGEST_LIVE_LINE = 1 << 12
_MARK = LIVE_LINE.encode()
_LIVE_LINE = re.compile(re.escape(_MARK) + rb"[^\r\n\x1b]{,%d}\r" % _LONGEST_LIVE_LINE)
_COLOUR = re.compile(rb"\x1b\[[0-9;]{,32}m")
_BEGUN = re.compile(rb"(?:%s[^\r\n\x1b]*|\x1b\[[0-9;]{,32}|%s)\Z" % (
    re.escape(_MARK), b"|".join(re.escape(_MARK[:length]) for length in range(len(_MARK) - 1, 0, -1))))
_LINE_ENDS = (b"\n", b"\r")


def open_log(info: RankInfo, run_dir: RunDir, folder: PrivateFolder | None) -> tuple[Path, int]:
    """The rank's log while it runs, and a descriptor to append to it. `folder` is the node's, None where it has
    none.

    Raises:
        OSError: it cannot be written; a link stands there.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    if info.rank and info.world_size > MANY_RANKS and folder is not None:
        name = file_of(info.rank, LOG)
        return folder.path / name, folder.open(name, flags)
    path = run_dir.rank_log(info.rank)
    return path, ours(str(path), flags)


def most_log_bytes(info: RankInfo, is_on_node: bool, env: Mapping[str, str]) -> int:
    """How much of a rank's output its log takes, beside the last of it."""
    if wanted := env.get(LOG_BYTES_VARIABLE):
        return int(wanted)
    return _MOST_BYTES_ON_NODE // info.local_size if is_on_node else _MOST_LOG_BYTES


class Output:
    """One rank's output. `log` is an open descriptor; `tee` is launch's --tee. Once the log has taken `most` bytes
    it takes no more, but for the last of what comes: a program that prints without end must not fill the disk.
    `is_coloured` where launch told the rank that a terminal shows its colours, which are not for the log."""

    def __init__(self, rank: int, log: int, tee: str, most: int = _MOST_LOG_BYTES, *,
                 is_coloured: bool = False) -> None:
        self.rank = rank
        self.is_split = tee == "all" or (tee == "0" and rank == 0)
        """Whether standard output and standard error go different ways."""
        self._log = log
        self._is_coloured = is_coloured
        self._prefix = f"[{rank}] ".encode() if tee == "all" else None
        self._kept = bytearray()
        self._begun = {1: b"", 2: b""}
        self._begun_live = {1: b"", 2: b""}
        self._has_console = True
        self._is_within_a_line = False
        self._has_log = True
        self._most = self._room = most
        self._left_out = 0
        self._touched = 0.0

    def write(self, stream: int, data: bytes) -> None:
        """Take what the rank wrote to `stream` (1 or 2)."""
        lasting, self._begun_live[stream] = _without_live_lines(self._begun_live[stream] + data)
        self._keep(self._without_colours(lasting))
        if self.is_split and self._prefix is None:
            self._to_console(stream, data)
        elif self.is_split:
            for batch in _batches(self._whole_lines(stream, data)):
                self._to_console(stream, batch)

    def close(self) -> None:
        """Show what was begun as a line and never ended, and add the last of it to a log that left some out."""
        for begun in self._begun_live.values():
            self._keep(begun)
        self._begun_live = {1: b"", 2: b""}
        for stream, rest in self._begun.items():
            if rest:
                self._to_console(stream, (self._prefix or b"") + rest + b"\n")
        self._begun = {1: b"", 2: b""}
        if self._left_out:
            last = bytes(self._kept[-min(_KEPT_BYTES, self._left_out):])
            self._to_log(b"\nlaunch: %d bytes are left out here\n" % (self._left_out - len(last)) + last)
            self._left_out = 0

    def say(self, text: str) -> None:
        """A line of the shim's own, for the console and for launch's post-mortem."""
        self.write(2, f"launch: {text}\n".encode())

    def tail(self) -> str:
        """The last of the output (128 KiB or more, if there was that much); what is no UTF-8 is replaced."""
        return self._kept.decode(errors="replace")

    def left_to(self, pipes: Sequence[int]) -> tuple[Callable[[], None], tuple[int, ...]]:
        """For the janitor: what saves a rank's last words to its log if the shim is killed before it could read
        them from the `pipes`, and the descriptors that this needs. MPI_Abort kills like that."""

        def save() -> None:
            """Read what is still in the pipes, and write it to the log."""
            deadline, unread = time.monotonic() + _LAST_WORDS_S, set(pipes)
            while unread and (left := deadline - time.monotonic()) > 0:
                for pipe in select.select(unread, (), (), left)[0]:
                    data = os.read(pipe, 65536)
                    self._to_log(self._without_colours(data))
                    if not data:
                        unread.remove(pipe)

        return save, (*pipes, self._log)

    def _whole_lines(self, stream: int, data: bytes) -> list[bytes]:
        # What ends with a carriage return is a progress bar's line.
        data = self._begun[stream] + data
        lines = data.splitlines(keepends=True)
        rest = lines.pop() if lines and not lines[-1].endswith(_LINE_ENDS) else b""
        while len(rest) > _LONGEST_LINE:
            # Without an end it would be copied again with all that comes, and hold the rank up.
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._begun[stream] = rest
        return [(self._prefix or b"") + line.rstrip(b"\r\n") + b"\n" for line in lines]

    def _without_colours(self, data: bytes) -> bytes:
        return _COLOUR.sub(b"", data) if self._is_coloured else data

    def _keep(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]
        begin = data[:self._room]
        self._room -= len(begin)
        if begin:
            self._to_log(begin)
        if len(begin) == len(data):
            return
        if not self._left_out:
            note = (f"launch: rank {self.rank}'s log has reached its limit of {self._most} bytes"
                    f" ({LOG_BYTES_VARIABLE})")
            self._to_log(f"\n{note}\n".encode())
            self._say_aside(f"{note}; it will still get the end of the output")
        self._left_out += len(data) - len(begin)
        if (now := time.monotonic()) > self._touched + _TOUCH_S:
            # Whoever looks whether the rank is busy sees that it still writes.
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self._log)

    def _say_aside(self, note: str) -> None:
        _write(2, (("\n" if self._is_within_a_line else "") + note + "\n").encode())

    def _to_log(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._log, data):]
            self._has_log = True
        except OSError as error:
            # A full disk is no reason to end the rank.
            if self._has_log:
                self._has_log = False
                self._say_aside(f"launch: rank {self.rank} continues without its log: {error.strerror}")

    def _to_console(self, stream: int, data: bytes) -> None:
        # A console that has gone (`launch … | head`) does not end the rank: the log goes on.
        self._has_console = self._has_console and _write(stream, data)
        self._is_within_a_line = not data.endswith(b"\n")


def _without_live_lines(data: bytes) -> tuple[bytes, bytes]:
    """`data` without our live lines, which are for terminals, and the begin of one, or of a colour's code, at its
    end, which the next read may complete. All else stays as it is."""
    kept = _LIVE_LINE.sub(b"", data)
    begun = _BEGUN.search(kept, max(0, len(kept) - _LONGEST_LIVE_LINE))
    at = len(kept) if begun is None else begun.start()
    return kept[:at], kept[at:]


def _batches(lines: list[bytes]) -> Iterator[bytes]:
    """Whole lines in pieces that a pipe takes whole: so what the launcher reads from it ends with a line."""
    batch = b""
    for line in lines:
        if batch and len(batch) + len(line) > select.PIPE_BUF:
            yield batch
            batch = b""
        batch += line
    if batch:
        yield batch


def _write(descriptor: int, data: bytes) -> bool:
    """Write all of it; False where nobody reads any more."""
    while data:
        try:
            data = data[os.write(descriptor, data):]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
