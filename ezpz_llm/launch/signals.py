"""The signals that launch was sent."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)
_ONE_ORDER_S = 0.3
"""timeout(1) and schedulers signal a process and then its group: that is one order, not an impatient second one."""


class Signals:
    """Notes what comes: signals to stop, in order, and those that are the ranks' to understand."""

    def __init__(self) -> None:
        self.to_stop: list[signal.Signals] = []
        self._to_forward: list[signal.Signals] = []
        self._noted_at = float("-inf")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        # nohup's wish is kept. A shell's `launch … &` ignores Ctrl-C, but not a SIGINT meant for launch alone.
        heard = [number for number in (*_STOP, *_FORWARD)
                 if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def take_forwarded(self) -> list[signal.Signals]:
        """Those for the ranks that have come since this was last asked."""
        taken, self._to_forward = self._to_forward, []
        return taken

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if number in _FORWARD:
            self._to_forward.append(signal.Signals(number))
        elif number not in self.to_stop[-1:] or now - self._noted_at > _ONE_ORDER_S:
            self._noted_at = now
            self.to_stop.append(signal.Signals(number))
