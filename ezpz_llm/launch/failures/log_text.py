"""Log text with its long lines cut: the time of a pattern can grow with the square of a line's length."""

from __future__ import annotations

import re

LONGEST_LINE = 2000
"""Characters of a line that patterns see."""
_LONG = re.compile(rf"[^\n]{{{LONGEST_LINE + 1},}}")


def cut_line(line: str) -> str:
    """Return the first 2000 characters of a line. Of a longer line with carriage returns, such as a progress bar's,
    return what a terminal shows in the end."""
    if len(line) <= LONGEST_LINE:
        return line
    return line.rstrip("\r").rpartition("\r")[2][:LONGEST_LINE]


def cut_lines(text: str) -> str:
    """Return `text` with each line cut as by `cut_line`."""
    return _LONG.sub(lambda line: cut_line(line[0]), text)
