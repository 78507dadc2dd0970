"""A job's script: a template of `jobs/` with its places filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

from ezpz_llm.errors import UserError
from ezpz_llm.resources import data_dir

_HEADING = re.compile(r"^# ---- (\w+).*\n", re.MULTILINE)


def fill_template(name: str, introduction: str, sections: dict[str, list[str]]) -> str:
    """The template `name` with its introduction and the named sections replaced; the others stay as they are."""
    shebang, _, text = (data_dir("jobs") / name).read_text(encoding="utf-8").partition("\n")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    parts = [f"{shebang}\n{introduction}\n\n"]
    for heading, end in zip(headings, ends, strict=True):
        body = text[heading.end():end]
        if heading[1] in sections:
            body = "\n".join(sections[heading[1]]) + "\n\n"
        parts.append(heading[0] + body)
    return "".join(parts)


def request_lines(own: Sequence[str], of_site: Sequence[str], values: dict[str, str | None],
                  subjects: Callable[[str], set[str]], site: str) -> list[str]:
    """Our directives, less those that the site words differently, and then the site's with `values` in the place of
    {names}. A site that has its own line with {queue} or {account} says by it how these are asked for.

    Raises:
        UserError: the site's lines need a value that was not given.
    """
    taken = set().union(*(subjects(line) for line in of_site))
    named = {name for line in of_site for name in re.findall(r"\{(\w+)\}", line)}
    said = [line for line in own if not subjects(line) & taken and not _says_one_of(line, named, values)]
    return said + [_filled(line, values, site) for line in of_site]


def _says_one_of(line: str, named: set[str], values: dict[str, str | None]) -> bool:
    words = re.split(r"[=\s]", line)
    return any(values.get(name) is not None and words[-1] == values[name]
               for name in named & {"account", "queue", "reservation"})


def _filled(line: str, values: dict[str, str | None], site: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(f"unknown place {match[0]} in a directive: {line!r}", where=f"site {site}",
                            instead=" ".join(f"{{{name}}}" for name in values))
        if values[match[1]] is None:
            raise UserError(f"site {site} needs --{match[1]}", where=f"its directive {line!r}",
                            instead=f"ezpz-llm submit --{match[1]} … ")
        return str(values[match[1]])

    return re.sub(r"\{(\w+)\}", value, line)


def array_lines(name: str, words: Sequence[str], replaced: dict[str, str]) -> list[str]:
    """A bash array of `words`, exactly as they are; the words of `replaced` as the shell text that stands there.
    Words are put several to a line, for the sake of whoever reads it."""
    lines, line = [], f"{name}=("
    for position, word in enumerate(words):
        text = replaced.get(word) or shlex.quote(word)
        if position and len(line) + len(text) > 110:
            lines.append(line)
            line = "    "
        line += ("" if line.endswith(("(", "    ")) else " ") + text
    return [*lines, f"{line})"]
