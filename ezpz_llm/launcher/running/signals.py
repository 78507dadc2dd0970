"""Signals that ask launch to stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = tuple(128 + number for number in _STOP)
"""Exit codes of a run that was stopped by a signal to launch."""
_REPEAT_WITHIN_S = 0.3
"""Time within which repeated SIGINTs count as one: timeout(1) signals a process, then its group."""


class Signals:
    """Received signals: those that stop the run, in order, and those to forward to the ranks.

    After the first one, only SIGINT is added: a second Ctrl-C ends the ranks at once. Other signals are often
    repeated, for example SIGHUP when a terminal is closed and when its shell then ends.
    """

    def __init__(self) -> None:
        self.to_stop: list[signal.Signals] = []
        self.to_forward: list[signal.Signals] = []
        self._noted_at = float("-inf")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals instead of dying from them, within the `with` block."""
        # Keep an ignored SIGHUP (nohup). Do handle an ignored SIGINT: a shell sets that for `launch … &`, but the
        # user may send one to launch alone.
        handled = [number for number in (*_STOP, *_FORWARD)
                   if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if number in _FORWARD:
            self.to_forward.append(signal.Signals(number))
        elif not self.to_stop or (number == signal.SIGINT and now - self._noted_at > _REPEAT_WITHIN_S):
            self._noted_at = now
            self.to_stop.append(signal.Signals(number))
