"""A regular expression with a limit of processor time: one such as (a+)+$ tries ever more ways, and would be at a
line of 50 characters for years."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ezpz_llm.launch.failures.log_text import LONGEST_LINE

MOST_S = 1.0
"""Of processor time, for all lines that a pattern is searched in together."""
_COUNTED_S = 0.01
"""A search below this counts as nothing, so that a fast pattern is searched in the words of any number of ranks: on
a busy machine the clock itself is 4 ms wrong at times."""
_REPEAT_S = 0.05
"""Processor time between interrupts once the limit is over."""


_Result = TypeVar("_Result")


class _TooSlow(Exception):
    """The time is over."""


class TimedPattern:
    """A pattern that is not searched any more once it took its time. Of use in the main thread only, as it is a
    signal that interrupts the search.

    Args:
        limit_s: None for a pattern of our own, which is known to be fast: a limit costs 10 µs for each search.

    Raises:
        re.error, OverflowError, RecursionError: it is no regular expression.
        TimeoutError: the time was over before it was read.
    """

    def __init__(self, text: str, limit_s: float | None = MOST_S) -> None:
        self.text = text
        self._left_s = limit_s
        self._is_timed = False
        # A large class of characters in any case, and a thousand of them, take minutes.
        compiled = self._timed(lambda: re.compile(text))
        if compiled is None:
            raise TimeoutError(f"takes more than {limit_s:g} s to be read")
        self._compiled = compiled

    @property
    def groups(self) -> frozenset[str]:
        """The names of its groups."""
        return frozenset(self._compiled.groupindex)

    @property
    def is_over(self) -> bool:
        """Has it taken its time?"""
        return self._left_s is not None and self._left_s <= 0

    def search(self, line: str) -> re.Match[str] | None:
        """Where the line has it, in its first 2000 characters; None where the time is over."""
        if self.is_over:
            return None
        return self._timed(lambda: self._compiled.search(line[:LONGEST_LINE]))

    def _timed(self, work: Callable[[], _Result]) -> _Result | None:
        """What `work` gives, None if the time was over before."""
        if self._left_s is None:
            return work()
        began = time.process_time()
        before = signal.signal(signal.SIGVTALRM, self._interrupt)
        try:
            self._is_timed = True
            # Repeated, because an exception raised inside a callback of the garbage collector is lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._left_s, _REPEAT_S)
            return work()
        except _TooSlow:
            self._is_timed = False
            self._left_s = 0.0
            return None
        finally:
            self._is_timed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            spent = time.process_time() - began
            self._left_s -= spent if spent > _COUNTED_S else 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # One that comes late must not end what follows on the work.
        if self._is_timed:
            raise _TooSlow
