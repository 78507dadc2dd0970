"""Abilities of the console: its width, colour, and characters beyond ASCII."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from ezpz_llm.launch.variables import IN_COLOUR, RANK_VARIABLE, TERMINAL_VARIABLE

DEFAULT_WIDTH = 80
WIDTH_LIMIT = 200
"""Columns beyond which a plot no longer gets easier to read."""


def terminal_width() -> int:
    """Columns of the terminal (COLUMNS, what launch or it says), 80 where there is none, at most WIDTH_LIMIT."""
    if not os.environ.get("COLUMNS") and (told := _columns_told(os.environ)) is not None:
        return min(WIDTH_LIMIT, told)
    return min(WIDTH_LIMIT, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns or DEFAULT_WIDTH)


def redraws(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """True if `stream` (standard output) reaches a terminal whose last line can be written anew, through launch or
    directly."""
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    return _columns_told(env) is not None or (stream.isatty() and env.get("TERM", "dumb") != "dumb")


def _columns_told(env: Mapping[str, str]) -> int | None:
    """Columns of the terminal that launch was started in, for the rank whose output it shows."""
    told = env.get(TERMINAL_VARIABLE, "").removesuffix(IN_COLOUR)
    return int(told) if told.isdecimal() and env.get(RANK_VARIABLE, "0") == "0" else None


def wants_colour(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """True if `stream` (standard output) reaches a terminal that knows colours (TERM is not "dumb") and whose user
    has not set NO_COLOR (https://no-color.org), through launch or directly."""
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    if _columns_told(env) is not None:
        return env[TERMINAL_VARIABLE].endswith(IN_COLOUR)
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def wants_ascii(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """True if `stream` (standard output) cannot write braille, or the locale is C by name.

    Python itself writes UTF-8 in the C locale (PEP 538, PEP 540), which a terminal that was set to C may not show.
    """
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    locale = env.get("LC_ALL") or env.get("LANG") or ""
    return locale in ("C", "POSIX") or not (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
