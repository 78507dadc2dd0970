"""Text that comes from outside, made safe for a terminal."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters but tab, newline and DEL, which terminals pass over; with C1, where 0x9b begins a sequence by
# itself; line and paragraph separators; marks that turn the direction of writing; halves of surrogate pairs, which
# no encoding writes.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cleaned(text: str) -> str:
    """`text` without colours, and with each other character that a terminal would obey, or not show, as its escape:
    `\\x1b]0;title\\x07`.

    For error messages and all that another process, host or file said. Newlines and tabs stay.
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], _COLOUR.sub("", text))


def show(text: str) -> None:
    """Print lines that hold words from outside, and no escape sequences of ours."""
    print(cleaned(text), flush=True)


def is_one_line(text: str) -> bool:
    """Has it no control characters at all?"""
    return not any(character < " " or "\x7f" <= character < "\xa0" for character in text)
