"""The parser of a command: the name that was typed in its usage lines, examples, and the option that was meant."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from ezpz_llm.base.errors import UserError, nearest
from ezpz_llm.base.shell_commands import typable, typable_text
from ezpz_llm.base.synonyms import unknown_option

_WIDEST = 110
_REWORDED = {
    r"argument (.*): invalid int value: (.*)": r"\1 is \2: it must be a whole number",
    r"argument (.*): invalid float value: (.*)": r"\1 is \2: it must be a number",
    r"argument (.*): expected (?:one|at least one) argument": r"\1 needs a value",
    r"argument (.*): ignored explicit argument (.*)": r"\1 takes no value, but was given \2",
    r"argument (.*): (.*)": r"\1: \2",
    r"the following arguments are required: (.*)": r"missing: \1",
    r"unrecognized arguments: (.*)": r"unexpected: \1",
}
"""Messages of argparse, and our words for them."""


def help_width() -> int:
    """Columns that a help page takes: the terminal's, at most 110."""
    return min(shutil.get_terminal_size().columns, _WIDEST) - 2


def wrapped(text: str, begin: str = "", indent: int = 0) -> str:
    """Return a paragraph in lines of `help_width`, the first after `begin`, the others after `indent` spaces."""
    return textwrap.fill(" ".join(text.split()), help_width(), initial_indent=begin, subsequent_indent=" " * indent,
                         break_on_hyphens=False, break_long_words=False)


def typed_name(command: str) -> str:
    """Return how a command was typed: `ezpz-llm report`, `python3 -m ezpz_llm.report`, or `launch`."""
    if command == "launch" and os.path.basename(sys.argv[0]) == command:
        return typable(command)
    typed = f"ezpz-llm {command}"
    return typable(typed if sys.argv[0] == typed else f"python3 -m ezpz_llm.{command}")


def examples(lines: Sequence[str]) -> str:
    """Return the examples at the end of a help page, each a line to copy; two spaces begin its explanation."""
    shown = []
    for line in lines:
        command, _, why = line.partition("  ")
        command = typable_text(command)
        one = f"  {command}   # {why.strip()}" if why else f"  {command}"
        shown += [one] if not why or len(one) <= help_width() else [f"  # {why.strip()}", f"  {command}"]
    return "\n".join(["examples:", *shown])


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the paragraphs of a text; as wide as the terminal, 110 columns at most."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"width": help_width(), **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(map(wrapped, text.strip().split("\n\n")))


class CommandParser(argparse.ArgumentParser):
    """argparse's parser whose mistakes are `UserError`s that name the option or word that was meant.

    Args:
        command: its name after `ezpz-llm`; None for a subcommand, whose name argparse makes.
        shown: lines for `examples`.
    """

    def __init__(self, command: str | None = None, *, shown: Sequence[str] = (), **settings: Any) -> None:
        if command is not None:
            settings["prog"] = typed_name(command)
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter,
                            "epilog": examples(shown) if shown else None, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            UserError: always.
        """
        help_page = f"{self.prog} --help lists all options"
        if message.startswith("unrecognized arguments: "):
            words = message.partition(": ")[2].split()
            option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
            if option is not None:
                raise unknown_option(option, self._options(), where=self.prog, remark=help_page)
        found = re.fullmatch(r"argument (.*): (invalid choice: '(.*)') \(choose from (.*)\)", message, re.DOTALL)
        if found:
            choices = found[4].replace("'", "").split(", ")
            near = nearest(found[3], choices)
            instead = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(choices)}"
            raise UserError(f"{found[1]}: {found[2]}", where=self.prog, instead=instead)
        for pattern, better in _REWORDED.items():
            if found := re.fullmatch(pattern, message, re.DOTALL):
                raise UserError(found.expand(better), where=self.prog, instead=help_page)
        raise UserError(message, where=self.prog, instead=help_page)

    def _options(self) -> set[str]:
        """The options of this parser and of its subcommands: argparse lets the outer one refuse both's."""
        known: set[str] = set()
        for action in self._actions:
            known.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(below._options() for below in action.choices.values()))
        return known
