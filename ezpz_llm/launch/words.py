"""Reading options off the front of a command line whose rest belongs to another command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.base.limits import MOST_SECONDS, whole_number
from ezpz_llm.errors import UserError, nearest


@dataclass(frozen=True)
class Option:
    """One option: `words` spell it, `field` names its value, `value` is how the help calls that (None: it takes
    none). `convert` raises ValueError with what is accepted."""

    words: tuple[str, ...]
    field: str
    help: str
    value: str | None = None
    convert: Callable[[str], Any] = str


def split_options(words: Sequence[str], options: Sequence[Option],
                  example: str) -> tuple[dict[str, Any], list[str]]:
    """The values of the options that `words` begin with, by field, and the words after them.

    Options end at the first word that does not begin with a dash, or after `--`. `--option=value` is read as
    `--option value`; nothing can be abbreviated. `example` shows, after an unknown `{option}`, where it belongs.

    Raises:
        UserError: an unknown option (the nearest is offered), a missing or unusable value.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = _find(name, options, example)
        if option.value is None:
            if equals:
                raise UserError(f"{name} takes no value, but was given {value!r}", instead=name)
            found[option.field] = True
            continue
        if not equals:
            if not rest:
                raise UserError(f"{name} needs a value", instead=f"{name} {option.value}")
            value = rest.pop(0)
        try:
            found[option.field] = option.convert(value)
        except ValueError as error:
            raise UserError(f"{name} {value!r} is not {error}", instead=f"{name} {option.value}") from error
        if not value:
            # Mostly a shell's variable that is not set.
            raise UserError(f"the value of {name} is empty", instead=f"{name} {option.value}")
    return found, rest


def _find(name: str, options: Sequence[Option], example: str) -> Option:
    for option in options:
        if name in option.words:
            return option
    near = nearest(name, [word for option in options for word in option.words])
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"unknown option {name}",
                    instead=f"{hint}(options of the command come after it: {example.format(option=name)})")


def option_lines(options: Sequence[Option]) -> list[str]:
    """The options as a help page lists them."""
    spelled = [(", ".join(option.words) + (f" {option.value}" if option.value else ""), option.help)
               for option in options]
    return [f"  {words:<20}  {text}" for words, text in spelled]


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    def convert(text: str) -> int:
        value = whole_number(text)
        if value is None or value < least:
            raise ValueError(f"a whole number, {least} or more")
        if value > most:
            raise ValueError(f"a whole number, {most:,} at most")
        return value

    return convert


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_SECONDS:
        raise ValueError("a number of seconds above 0, and less than ten years")
    return value


def seconds_or_never(text: str) -> float:
    """A number of seconds, 0 for no limit."""
    try:
        return 0.0 if float(text) == 0 else seconds(text)
    except ValueError:
        raise ValueError("a number of seconds, or 0 for no limit") from None


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """One of the names."""
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text

    return convert


def command_line(text: str) -> tuple[str, ...]:
    """Words as a shell would split them."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not words:
        raise ValueError("a command line")
    return words
