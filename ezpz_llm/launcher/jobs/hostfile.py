"""Reader for hostfiles, which have one hostname per line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from ezpz_llm.core.base import MAX_NODES, UserError, read_text
from ezpz_llm.launcher.basics.hostnames import node_keys
from ezpz_llm.launcher.jobs.schedulers.scheduler import Node

_HOSTFILE_ACCEPTED = ("one hostname per line: `host`, `host slots=N` or `host:N` (N ranks, 1 or more);"
                      " # starts a comment")

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)(?P<slots>[1-9][0-9]{0,8}))?")

_PROBLEMS = (
    (r"rank\s+\d+\s*=", "that is a line of an Open MPI rankfile", "`host slots=N`, with the number of ranks there"),
    (r"(?i:host)\s+(\S+)$", "that is a line of an ssh configuration", "the hostname alone: `{0}`"),
    (r"([^\s@]+)@([^\s@:]+)", "a hostfile cannot set the user",
     "`{1}` without the user; in ~/.ssh/config, `User {0}` under `Host {1}`"),
    (r"\[?[0-9a-fA-F]*:[0-9a-fA-F]*:", "IPv6 addresses are not supported",
     "a hostname, or an IPv4 address; a line in /etc/hosts gives an address a name"),
    (r"\w+://", "that is a URL", _HOSTFILE_ACCEPTED),
    (r"(\S+?)\[|(\S+?),", "a list of hosts", "one hostname per line, or --hosts with the list"),
    (r"(\S+)\s+([1-9]\d*)$", "the number of ranks needs the key slots", "`{0} slots={1}`"),
    (r"(\S+)\s+(?:slots\s*=\s*(\d+)\s+)?max[_-]slots\b", "Open MPI's max_slots has no counterpart",
     "`{0} slots=N`, with the number of ranks to start there"),
    (r"\S+?(?::|\s+slots\s*=\s*)(\S*)$", "{0!r} is not a number of ranks from 1 to 999999999", _HOSTFILE_ACCEPTED),
    (r"(\S+)\s.*?(?!slots\b)\b(\w+)\s*=", "the only key is slots, not {1}", "`{0} slots=N`"),
)
"""Common invalid lines: a pattern, the problem, and what to write instead."""


def read(path: Path) -> tuple[Node, ...]:
    """Read a hostfile.

    Raises:
        UserError: the file is missing, unreadable or empty, or a line is invalid.
    """
    try:
        text = read_text(path)
    except UserError as error:
        raise UserError(f"cannot read the hostfile: {error.found}", where=str(path),
                        instead=_HOSTFILE_ACCEPTED) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> tuple[Node, ...]:
    """Return the nodes listed in `text`.

    A node that is listed several times without slots has that many slots, as in a PBS node file.

    Raises:
        UserError: a line is invalid; the message has `where`, the line number and the line.
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
            raise UserError(f"{name} is listed twice, once with slots: {line!r}",
                            where=f"{where}, line {number} (first in line {first[key]})",
                            instead="list it once, with all its slots")
        first.setdefault(key, number)
        if count:
            slots[key] = count
    if len(first) > MAX_NODES:
        raise UserError(f"the hostfile lists {len(first):,} nodes", where=where, instead=f"at most {MAX_NODES:,}")
    if not names:
        raise UserError("the hostfile lists no nodes", where=where, instead=_HOSTFILE_ACCEPTED)
    repeats, spelling = Counter(keys), dict(zip(reversed(keys), reversed(names), strict=True))
    return tuple(Node(spelling[key], slots=slots.get(key, repeats[key] if repeats[key] > 1 else None))
                 for key in repeats)


def _explain(line: str) -> tuple[str, str]:
    """Return the problem with an invalid line, and what to write instead."""
    for pattern, problem, instead in _PROBLEMS:
        if match := re.match(pattern, line[:200]):  # bounds the cost of the patterns
            return f": {problem.format(*match.groups())}", instead.format(*match.groups())
    return "", _HOSTFILE_ACCEPTED
