"""Truncation of long log lines: the search time of a pattern can grow with the square of a line's length."""

from __future__ import annotations

import re

LONGEST_LINE = 2000
"""Number of characters of a line that are searched."""
_LONG = re.compile(rf"[^\n]{{{LONGEST_LINE + 1},}}")


def cut_line(line: str) -> str:
    """Return at most 2000 characters of a line.

    In a longer line with carriage returns, such as a progress bar's, only the text after the last one is used, as a
    terminal would show it.
    """
    if len(line) <= LONGEST_LINE:
        return line
    return line.rstrip("\r").rpartition("\r")[2][:LONGEST_LINE]


def cut_lines(text: str) -> str:
    """Apply `cut_line` to every line of `text`."""
    return _LONG.sub(lambda line: cut_line(line[0]), text)
