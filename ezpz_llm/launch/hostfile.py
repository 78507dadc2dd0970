"""The format of hostfiles: one host a line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from ezpz_llm.base import MOST_HOSTS, UserError, read_text
from ezpz_llm.launch.hostnames import node_keys
from ezpz_llm.launch.schedulers.scheduler import Host

HOSTFILE_ACCEPTED = "one host a line: `host`, `host slots=N` or `host:N` (N ranks, 1 or more); # starts a comment"

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)(?P<slots>[1-9][0-9]{0,8}))?")

_PROBLEMS = (
    (r"rank\s+\d+\s*=", "that is a line of an Open MPI rankfile", "`host slots=N`, with the number of ranks there"),
    (r"(?i:host)\s+(\S+)$", "that is a line of an ssh configuration", "the hostname alone: `{0}`"),
    (r"([^\s@]+)@([^\s@:]+)", "a hostfile names no user",
     "`{1}` without the user; in ~/.ssh/config, `User {0}` under `Host {1}`"),
    (r"\[?[0-9a-fA-F]*:[0-9a-fA-F]*:", "IPv6 addresses are not supported",
     "a hostname, or an IPv4 address; a line in /etc/hosts gives an address a name"),
    (r"\w+://", "that is a URL", HOSTFILE_ACCEPTED),
    (r"(\S+?)\[|(\S+?),", "a list of hosts", "one host a line, or --hosts with the list"),
    (r"(\S+)\s+([1-9]\d*)$", "slots need their name", "`{0} slots={1}`"),
    (r"(\S+)\s+(?:slots\s*=\s*(\d+)\s+)?max[_-]slots\b", "Open MPI's max_slots has no counterpart",
     "`{0} slots=N`, with the number of ranks to start there"),
    (r"\S+?(?::|\s+slots\s*=\s*)(\S*)$", "{0!r} is not a number of ranks from 1 to 999999999", HOSTFILE_ACCEPTED),
    (r"(\S+)\s.*?(?!slots\b)\b(\w+)\s*=", "the only key is slots, not {1}", "`{0} slots=N`"),
)
"""Lines from elsewhere: a pattern, what is wrong, and what to write instead."""


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of the file, in its order.

    Raises:
        UserError: the file is missing, unreadable or empty, or a line is none of the accepted forms.
    """
    try:
        text = read_text(path)
    except UserError as error:
        raise UserError(f"cannot read the hostfile: {error.found}", where=str(path),
                        instead=HOSTFILE_ACCEPTED) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> tuple[Host, ...]:
    """The hosts named in `text`. A plain name repeated counts as slots, as in a PBS node file.

    Raises:
        UserError: with `where`, the line's number and its text.
    """
    lines: list[tuple[int, str, str, int | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            problem, instead = _explain(content)
            raise UserError(f"not a hostfile line: {line.strip()!r}{problem}", where=f"{where}, line {number}",
                            instead=instead)
        lines.append((number, line.strip(), match["name"], int(match["slots"]) if match["slots"] else None))
    names = [name for _, _, name, _ in lines]
    first: dict[str, int] = {}
    slots: dict[str, int] = {}
    keys = node_keys(names, where)
    for key, (number, line, name, count) in zip(keys, lines, strict=True):
        if key in first and (count or key in slots):
            raise UserError(f"host {name} is named twice, once with its slots: {line!r}",
                            where=f"{where}, line {number} (before: line {first[key]})",
                            instead="name it once, with all its slots")
        first.setdefault(key, number)
        if count:
            slots[key] = count
    if len(first) > MOST_HOSTS:
        raise UserError(f"the hostfile names {len(first):,} hosts", where=where, instead=f"{MOST_HOSTS:,} at most")
    if not names:
        raise UserError("the hostfile names no host", where=where, instead=HOSTFILE_ACCEPTED)
    repeats, spelling = Counter(keys), dict(zip(reversed(keys), reversed(names), strict=True))
    return tuple(Host(spelling[key], slots=slots.get(key, repeats[key] if repeats[key] > 1 else None))
                 for key in repeats)


def _explain(line: str) -> tuple[str, str]:
    """Return what is wrong with a line that is not accepted, and what to write instead."""
    for pattern, problem, instead in _PROBLEMS:
        if match := re.match(pattern, line[:200]):  # long enough for any line that somebody typed
            return f": {problem.format(*match.groups())}", instead.format(*match.groups())
    return "", HOSTFILE_ACCEPTED
