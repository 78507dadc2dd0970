"""Parts of help pages: names of commands as typed, wrapped paragraphs, and examples (no argparse)."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from ezpz_llm.core.base.shell_commands import to_typable, to_typable_text

_MAX_WIDTH = 110


def help_width() -> int:
    """Return the width of a help page in columns: the terminal's width minus 2, at most 108."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 2


def wrap_paragraph(text: str, begin: str = "", indent: int = 0) -> str:
    """Wrap a paragraph to `help_width`. Start the first line with `begin`, and others with `indent` spaces."""
    return textwrap.fill(" ".join(text.split()), help_width(), initial_indent=begin, subsequent_indent=" " * indent,
                         break_on_hyphens=False, break_long_words=False)


def typed_name(command: str) -> str:
    """Return a command as the user typed it: `ezpz-llm report`, `python3 -m ezpz_llm.report`, or `launch`."""
    if command == "launch" and os.path.basename(sys.argv[0]) == command:
        return to_typable(command)
    typed = f"ezpz-llm {command}"
    return to_typable(typed if sys.argv[0] == typed else f"python3 -m ezpz_llm.{command}")


def examples(lines: Sequence[str]) -> str:
    """Format the examples of a help page. In each of `lines`, two spaces separate command and explanation."""
    shown = []
    for line in lines:
        command, _, explanation = line.partition("  ")
        command = to_typable_text(command)
        example = f"  {command}   # {explanation.strip()}" if explanation else f"  {command}"
        fits = not explanation or len(example) <= help_width()
        shown += [example] if fits else [f"  # {explanation.strip()}", f"  {command}"]
    return "\n".join(["examples:", *shown])
