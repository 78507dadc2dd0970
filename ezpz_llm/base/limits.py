"""How large the numbers of a run can be: each limit is beyond all machines that there are, and far below what would
fill a login node's memory or keep it busy. What is beyond is a slip of the finger, or somebody's mischief."""

from __future__ import annotations

MOST_HOSTS = 200_000
MOST_RANKS = 2_000_000
MOST_RANKS_ON_A_HOST = 10_000
"""A Linux host has 32768 process numbers unless it is told otherwise, and a rank takes three or more."""
MOST_CORES_ON_A_HOST = 1_000_000
LONGEST_HOST = 255
"""Characters of a host's name: DNS has at most 253."""
MOST_STEPS = 10**9
MOST_TOKENS = 10**15
MOST_REPEATS = 1000
"""Runs of one point of a study, and jobs of a chain."""
LAST_SECOND = 253_402_300_799
"""Of the year 9999, since 1970: calendars reach no further."""
MOST_SECONDS = 10 * 366 * 86_400


def whole_number(text: str) -> int | None:
    """The whole number that a text is, in the digits 0 to 9 and below 10^18; None where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def epoch(text: str) -> float | None:
    """Whole seconds since 1970, as far as calendars reach; None where it is no such text."""
    seconds = whole_number(text)
    return None if seconds is None or seconds > LAST_SECOND else float(seconds)
