"""Argument parser of the commands: usage lines as typed, examples, and suggestions for unknown options.

argparse has no public way to list a parser's options or to keep paragraphs, so this module uses private names of
argparse. No other module may use them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ezpz_llm.core.base.errors import UserError, nearest_names
from ezpz_llm.core.base.help_pages import examples, help_width, typed_name, wrap_paragraph
from ezpz_llm.core.base.synonyms import unknown_option_error

_REPLACEMENTS = {
    r"argument (.*): invalid int value: (.*)": r"\1 is \2: it must be a whole number",
    r"argument (.*): invalid float value: (.*)": r"\1 is \2: it must be a number",
    r"argument (.*): expected (?:one|at least one) argument": r"\1 needs a value",
    r"argument (.*): ignored explicit argument (.*)": r"\1 takes no value, but was given \2",
    r"argument (.*): (.*)": r"\1: \2",
    r"the following arguments are required: (.*)": r"missing: \1",
    r"unrecognized arguments: (.*)": r"unexpected: \1",
}
"""Patterns of argparse's messages, and the messages that replace them."""


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter that keeps paragraphs and uses `help_width`."""

    def __init__(self, prog: str, **settings: Any) -> None:
        _find(argparse.HelpFormatter, "_fill_text")  # otherwise argparse would ignore the method below
        super().__init__(prog, **{"width": help_width(), **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(map(wrap_paragraph, text.strip().split("\n\n")))


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises a `UserError` for invalid arguments and suggests the likely option or word.

    Args:
        command: name after `ezpz-llm`; None for a subcommand, whose name argparse sets.
        shown: lines of examples for the help page; see `examples`.
    """

    def __init__(self, command: str | None = None, *, shown: Sequence[str] = (), **settings: Any) -> None:
        if command is not None:
            settings["prog"] = typed_name(command)
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter,
                            "epilog": examples(shown) if shown else None, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` instead of printing argparse's message and exiting."""
        help_page = f"{self.prog} --help lists all options"
        if message.startswith("unrecognized arguments: "):
            words = message.partition(": ")[2].split()
            option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
            if option is not None and (others := self._subcommands_with(option)):
                raise UserError(f"this subcommand has no option {option}", where=self.prog,
                                instead=f"omit {option}, which is an option of {self.prog} {', '.join(others)}")
            if option is not None:
                raise unknown_option_error(option, self._options(), where=self.prog, remark=help_page)
        match = re.fullmatch(r"argument (.*): (invalid choice: '(.*)') \(choose from (.*)\)", message, re.DOTALL)
        if match:
            choices = match[4].replace("'", "").split(", ")
            near = nearest_names(match[3], choices)
            instead = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(choices)}"
            raise UserError(f"{match[1]}: {match[2]}", where=self.prog, instead=instead)
        for pattern, replacement in _REPLACEMENTS.items():
            if match := re.fullmatch(pattern, message, re.DOTALL):
                raise UserError(match.expand(replacement), where=self.prog, instead=help_page)
        raise UserError(message, where=self.prog, instead=help_page)

    def _subcommands_with(self, option: str) -> list[str]:
        """Return the names of the subcommands that have an option."""
        return [name for name, subparser in _subparsers(self).items() if option in subparser._options()]

    def _options(self) -> set[str]:
        """Return the options of this parser and of its subcommands. argparse lets the outer parser reject unknown
        options of a subcommand, so suggestions need both."""
        return set(option_strings(self)).union(*(subparser._options() for subparser in _subparsers(self).values()))


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, in order of definition, without those of its subcommands."""
    return [option for action in _find(parser, "_actions") for option in action.option_strings]


def action_of(parser: argparse.ArgumentParser, option: str) -> argparse.Action:
    """Return the action of an option, which has its metavar and help text."""
    action: argparse.Action = _find(parser, "_option_string_actions")[option]
    return action


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the parsers of the subcommands, by name."""
    kind = _find(argparse, "_SubParsersAction")
    return {name: subparser for action in _find(parser, "_actions") if isinstance(action, kind)
            for name, subparser in action.choices.items()}


def _find(owner: Any, name: str) -> Any:
    """Return a private attribute of argparse, of a class in it, or of a parser.

    Raises:
        UserError: this version of Python has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UserError(f"argparse of Python {sys.version.split()[0]} has no {name}, which ezpz_llm uses",
                        where=sys.executable, instead="use Python 3.10 to 3.13") from None
