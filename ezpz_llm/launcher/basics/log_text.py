"""Lines of logs: truncation of long ones, and lines that read like an error.

The search time of a pattern can grow with the square of a line's length.
"""

from __future__ import annotations

import re

LONGEST_LINE = 2000
"""Number of characters of a line that are searched."""
BUILD_ERROR = re.compile(
    # gcc, clang, nvcc; linkers; ninja and CMake.
    r"^\S.{,300}?: (?:fatal )?error: |^nvcc fatal +: |^(?:\S*/)?(?:ld|collect2)\S*: .*(?:cannot find|undefined)"
    r"|^.{,300}?: undefined reference to |^ninja: error: |^CMake Error")
"""Error of a compiler or linker, which follows the command lines in the message of a failed build."""
ERROR_WORDS = re.compile(r"(?i)\b(?:errors?|fail(?:s|ed|ure)?|cannot|can't|could not|unable|invalid|corrupt(?:ed)?"
                         r"|denied|exceed(?:s|ed)?|overflow|fatal|out of|not (?:found|supported|enough)|no such"
                         r"|refused|killed|aborted|missing|mutually exclusive)\b")
"""Words of lines that read like an error."""
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
