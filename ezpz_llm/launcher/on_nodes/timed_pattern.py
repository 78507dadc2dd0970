"""Regular expressions with a limit on CPU time.

Backtracking in a pattern such as (a+)+$ takes years on a line of 50 characters.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ezpz_llm.launcher.basics.log_text import LONGEST_LINE

MAX_S = 1.0
"""Limit on the total CPU time of a pattern, over all lines."""
_MIN_CHARGED_S = 0.01
"""Shorter searches are not charged, so that a fast pattern can be used on the output of any number of ranks.

On a busy machine the CPU clock can be off by 4 ms.
"""
_REPEAT_S = 0.05
"""CPU time between further interrupts, after the first one at the limit."""


_Result = TypeVar("_Result")


class _TooSlow(Exception):
    """The time limit was exceeded."""


class TimedPattern:
    """Regular expression that matches nothing once its time is used up.

    Works in the main thread only, because a signal interrupts the search.

    Args:
        limit_s: limit on the total CPU time, which costs 10 µs per search; None for this package's patterns, which
            are known to be fast.

    Raises:
        re.error, OverflowError, RecursionError: invalid regular expression.
        TimeoutError: compiling it took longer than the limit.
    """

    def __init__(self, text: str, limit_s: float | None = MAX_S) -> None:
        self.text = text
        self._remaining_s = limit_s
        self._is_timed = False
        # Compiling a thousand large character classes with IGNORECASE takes minutes.
        compiled = self._timed(lambda: re.compile(text))
        if compiled is None:
            raise TimeoutError(f"takes more than {limit_s:g} s to compile")
        self._compiled = compiled

    @property
    def groups(self) -> frozenset[str]:
        """Names of the pattern's groups."""
        return frozenset(self._compiled.groupindex)

    @property
    def is_exhausted(self) -> bool:
        """True if the time is used up."""
        return self._remaining_s is not None and self._remaining_s <= 0

    def search(self, line: str) -> re.Match[str] | None:
        """Search the first 2000 characters of a line; None if there is no match or the time is used up."""
        if self.is_exhausted:
            return None
        return self._timed(lambda: self._compiled.search(line[:LONGEST_LINE]))

    def _timed(self, work: Callable[[], _Result]) -> _Result | None:
        """Return the result of `work`, or None if it exceeded the remaining time."""
        if self._remaining_s is None:
            return work()
        began = time.process_time()
        previous = signal.signal(signal.SIGVTALRM, self._interrupt)
        try:
            self._is_timed = True
            # Repeated, because an exception raised inside a callback of the garbage collector is lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._remaining_s, _REPEAT_S)
            return work()
        except _TooSlow:
            self._is_timed = False
            self._remaining_s = 0.0
            return None
        finally:
            self._is_timed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, previous)
            spent = time.process_time() - began
            self._remaining_s -= spent if spent > _MIN_CHARGED_S else 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # A late interrupt must not break the code after the search.
        if self._is_timed:
            raise _TooSlow
