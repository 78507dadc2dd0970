"""Options on a command line, read and left out; each takes one value, as `--name value` or `--name=value`."""

from __future__ import annotations

from collections.abc import Sequence


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of `option`, the last where it is given several times; None where it is not there."""
    found = None
    for position, word in enumerate(words):
        if word == option and position + 1 < len(words):
            found = words[position + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def without(words: Sequence[str], *options: str) -> tuple[str, ...]:
    """`words` less these options and their values."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word in options:
            is_value = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return tuple(kept)
