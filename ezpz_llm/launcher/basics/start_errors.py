"""Reasons why a program cannot be started."""

from __future__ import annotations

import shutil

from ezpz_llm.core.base import shorten_value, system_text

_MAX_FIRST_LINE = 256
"""Longest first line that Linux reads to find the interpreter of a script (BINPRM_BUF_SIZE)."""


def start_problem(program: str, error: OSError) -> str:
    """Return the reason of an error of exec: for a script without its interpreter, Linux reports a missing file."""
    path = shutil.which(program) if isinstance(error, FileNotFoundError) else None
    first = system_text(path, most=_MAX_FIRST_LINE).partition("\n")[0] if path else ""
    if not first.startswith("#!"):
        return str(error.strerror)
    return f"its first line, {shorten_value(first)}, names an interpreter that does not exist"
