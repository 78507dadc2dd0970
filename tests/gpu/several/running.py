"""Run a module or script in this process as the main program."""

from __future__ import annotations

import runpy
import sys


def run_program(words: list[str]) -> None:
    """Run `-m MODULE …` or `SCRIPT …`."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(sys.argv[0], run_name="__main__")
