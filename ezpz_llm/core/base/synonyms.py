"""Table of options of other trainers and launchers, and the error for an unknown option."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base.errors import UserError, nearest_names
from ezpz_llm.core.base.untrusted_input import parse_toml, read_text

_TABLE = Path(__file__).with_name("synonyms.toml")
_CUTOFF = 0.9
"""Minimum similarity of a misspelled synonym: --lerning-rate matches, --layr does not."""


class Row(NamedTuple):
    """Option of another program, and its replacements here; see synonyms.toml."""

    option: str
    program: str
    docs: str
    answers: tuple[str, ...]


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows of the table, in file order."""
    tables = parse_toml(read_text(_TABLE), str(_TABLE)).values()
    return tuple(Row(option, table["program"], table["docs"], tuple(answers))
                 for table in tables for option, answers in table["options"].items())


def _rows_of(option: str) -> list[Row]:
    """Return the rows for an option, or else for the most similar option. `_` and `-` are equivalent."""
    by_name: dict[str, list[Row]] = {}
    for row in rows():
        by_name.setdefault(_with_dashes(row.option), []).append(row)
    name = _with_dashes(option)
    similar = get_close_matches(name, by_name, 1, _CUTOFF)
    return by_name.get(name) or [row for near in similar for row in by_name[near]]


def synonym(option: str, known: Collection[str]) -> tuple[str, str | None]:
    """Return the programs that have an option, as text ("" if none), and its replacement here (None if unknown)."""
    matches = _rows_of(option)
    answers = (answer for row in matches for answer in row.answers)
    return (" and ".join(dict.fromkeys(row.program for row in matches)),
            next((answer for answer in answers if all(name in known for name in options_in(answer))), None))


def unknown_option_error(option: str, known: Collection[str], *, where: str | None = None,
                         remark: str = "") -> UserError:
    """Return the error for an unknown option.

    The message names the programs that have the option, and the option of this command with the same meaning or a
    similar name. `remark` is appended to a guess from similar names, and is used alone if there is neither.
    """
    if _with_dashes(option) in known:
        return UserError(f"unknown option {option!r}", where=where, instead=_with_dashes(option))
    programs, answer = synonym(option, known)
    message = f"unknown option {option!r}" + (f", an option of {programs}" if programs else "")
    if answer is not None:
        return UserError(message, where=where, instead=answer)
    near = [] if programs else nearest_names(option, known)
    guess = f"did you mean {' or '.join(near)}?" if near else ""
    return UserError(message, where=where, instead=f"{guess} {remark}".strip())


def options_in(answer: str) -> Sequence[str]:
    """Return the options in an answer that begins with an option; empty for other answers."""
    return re.findall(r"(?<!\S)-{1,2}[A-Za-z][A-Za-z0-9-]*", answer) if answer.startswith("-") else []


def _with_dashes(option: str) -> str:
    return option.replace("_", "-")
