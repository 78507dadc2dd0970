"""Hostfiles: one host a line."""

from __future__ import annotations

import re
from pathlib import Path

from ezpz_llm.base.limits import MOST_HOSTS
from ezpz_llm.base.outside import read_text
from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import Host, count_repeats, short_name

ACCEPTED = "one host a line: `host`, `host slots=N` or `host:N` (N ranks, 1 or more); # starts a comment"

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)(?P<slots>[1-9][0-9]{0,8}))?")


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of the file, in its order.

    Raises:
        UserError: the file is missing, unreadable or empty, or a line is none of the accepted forms.
    """
    try:
        text = read_text(path)
    except UserError as error:
        raise UserError(f"cannot read the hostfile: {error.found}", where=str(path), instead=ACCEPTED) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> tuple[Host, ...]:
    """The hosts named in `text`. A plain name repeated counts as slots, as in a PBS node file.

    Raises:
        UserError: with `where`, the line's number and its text.
    """
    plain: list[str] = []
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise UserError(f"not a hostfile line: {line.strip()!r}", where=f"{where}, line {number}",
                            instead=ACCEPTED)
        name, count = match["name"], match["slots"]
        key = short_name(name)
        if key in lines and (count or key in slots):
            raise UserError(f"host {name} is named twice, once with its slots: {line.strip()!r}",
                            where=f"{where}, line {number} (before: line {lines[key]})",
                            instead="name it once, with all its slots")
        lines.setdefault(key, number)
        plain.append(name)
        if count:
            slots[key] = int(count)
    if len(lines) > MOST_HOSTS:
        raise UserError(f"the hostfile names {len(lines):,} hosts", where=where, instead=f"{MOST_HOSTS:,} at most")
    if not plain:
        raise UserError("the hostfile names no host", where=where, instead=ACCEPTED)
    return tuple(Host(name, slots=slots.get(short_name(name), repeats if repeats > 1 else None))
                 for name, repeats in count_repeats(plain).items())
