"""Capabilities of the console: width, color, and non-ASCII characters."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from ezpz_llm.launcher.basics.variables import IN_COLOR, RANK_VARIABLE, TERMINAL_VARIABLE

DEFAULT_WIDTH = 80
_WIDTH_LIMIT = 200
"""Maximum width in columns. Wider plots are not easier to read."""


def terminal_width() -> int:
    """Return the width of the terminal in columns, at most 200.

    The width is that in COLUMNS, else launch's, else the terminal's own; 80 without a terminal.
    """
    if not os.environ.get("COLUMNS") and (columns := _columns_from_launch(os.environ)) is not None:
        return min(_WIDTH_LIMIT, columns)
    return min(_WIDTH_LIMIT, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns or DEFAULT_WIDTH)


def can_redraw(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """Return True if `stream` (default: stdout) is a terminal whose last line can be rewritten, directly or through
    launch."""
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    return _columns_from_launch(env) is not None or (stream.isatty() and env.get("TERM", "dumb") != "dumb")


def _columns_from_launch(env: Mapping[str, str]) -> int | None:
    """Return the width of launch's terminal on rank 0, whose output launch shows there; else None."""
    columns = env.get(TERMINAL_VARIABLE, "").removesuffix(IN_COLOR)
    return int(columns) if columns.isdecimal() and env.get(RANK_VARIABLE, "0") == "0" else None


def wants_color(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """Return True if `stream` (default: stdout) is a color terminal, directly or through launch.

    False if TERM is "dumb" or the user has set NO_COLOR (https://no-color.org).
    """
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    if _columns_from_launch(env) is not None:
        return env[TERMINAL_VARIABLE].endswith(IN_COLOR)
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def wants_ascii(stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> bool:
    """Return True if `stream` (default: stdout) cannot write braille, or the locale is named C or POSIX.

    Python writes UTF-8 in the C locale (PEP 538, PEP 540), which a terminal in that locale may not display.
    """
    stream, env = sys.stdout if stream is None else stream, os.environ if env is None else env
    locale = env.get("LC_ALL") or env.get("LANG") or ""
    return locale in ("C", "POSIX") or not (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
