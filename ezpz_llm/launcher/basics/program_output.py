"""Marks on what a rank's program writes to standard error, which tell it from the launcher's own lines.

A launcher passes both through one pipe. The shim marks each line of the program. launch removes the marks, and
looks for messages of launchers and schedulers only in lines without one.
"""

from __future__ import annotations

import re

_BEGIN, _END = b"\x1b_ezpz_llm+\x1b\\", b"\x1b_ezpz_llm-\x1b\\"
"""Application program commands: a terminal that is shown one by mistake ignores it."""
_MARK = re.compile(re.escape(_BEGIN) + b"|" + re.escape(_END))
_LINE = re.compile(b"[^\n]*\n|[^\n]+")
_TOKEN = re.compile(b"(" + _MARK.pattern + b"|\n)")
_INCOMPLETE = re.compile(b"(?:%s)\\Z" % b"|".join(
    re.escape(mark[:length]) for mark in (_BEGIN, _END) for length in range(len(mark) - 1, 0, -1)))


def mark(data: bytes) -> bytes:
    """Mark output of a program, line by line, so that a launcher may print its own lines between them."""
    return b"".join(_BEGIN + line + (b"" if line.endswith(b"\n") else _END)
                    for line in _LINE.findall(_MARK.sub(b"", data)))


class MarkReader:
    """Reader of a launcher's standard error, in which shims have marked the output of programs."""

    def __init__(self) -> None:
        self._incomplete = b""
        self._is_marked = False

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """Return `data` without marks, and the part of it that no program wrote.

        A mark that is incomplete at the end of `data` is returned by the next call.
        """
        data = self._incomplete + data
        incomplete = _INCOMPLETE.search(data, max(0, len(data) - len(_BEGIN)))
        self._incomplete = incomplete[0] if incomplete else b""
        shown, of_launcher = bytearray(), bytearray()
        for token in _TOKEN.split(data[:len(data) - len(self._incomplete)]):
            if token in (_BEGIN, _END):
                self._is_marked = token == _BEGIN
                continue
            shown += token
            if not self._is_marked:
                of_launcher += token
            elif token == b"\n":
                self._is_marked = False
        return bytes(shown), bytes(of_launcher)

    def rest(self) -> bytes:
        """Return the end of the data, if it only resembled a mark."""
        return self._incomplete
