"""Texts that ranks print when they fail, as data: what each means, and what helps. `texts.toml` has those that are
shipped; a site names files of its own in EZPZ_LLM_FAILURE_TEXTS."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, nearest, parse_toml, read_text, shown, user_path
from ezpz_llm.launch.failures.kinds import Kind
from ezpz_llm.launch.failures.timed_pattern import MOST_S, TimedPattern
from ezpz_llm.launch.variables import FAILURE_TEXTS_VARIABLE

_KINDS = {kind.name.lower(): kind for kind in (
    Kind.DEVICE_MEMORY, Kind.HOST_MEMORY, Kind.MISSING_MODULE, Kind.DISK_FULL, Kind.DEVICE_BROKEN, Kind.PORT_TAKEN,
    Kind.NOT_FOUND, Kind.COLLECTIVE_TIMEOUT, Kind.PEER_LOST)}
_FROM_THE_RUN = ("run_dir", "hosts", "leave_out", "path", "elsewhere")
"""What an advice may name besides the groups of its patterns; failures/advice.py fills them in."""
_KEYS = {"kind": str, "cause": str, "patterns": list, "advice": str, "source": str, "examples": list}
_REQUIRED = ("cause", "patterns", "source", "examples")
_NAMED = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class FailureText:
    """One failure that is known by its words.

    `kind` is None where the end of the rank itself (an exception, a signal, a code) is the kind. `advice` may hold
    {NAME}: a group of a pattern, or {run_dir}, {hosts}, {leave_out}, {path}, {elsewhere}. Each of `examples` is a
    line as ranks print it; `source` is a link to who tells of it.
    """

    name: str
    kind: Kind | None
    cause: str
    patterns: tuple[TimedPattern, ...]
    advice: str
    source: str
    examples: tuple[str, ...]

    def found_in(self, line: str) -> re.Match[str] | None:
        """Where the line has one of the patterns."""
        return next((match for pattern in self.patterns if (match := pattern.search(line))), None)


@functools.cache
def shipped_texts() -> tuple[FailureText, ...]:
    """The texts of the package."""
    return read_texts(Path(__file__).with_name("texts.toml"), limit_s=None)


def site_texts(*environments: Mapping[str, str]) -> tuple[FailureText, ...]:
    """The texts of the files that the first of `environments` names which names any.

    Raises:
        UserError: as `read_texts`.
    """
    return tuple(text for path in named_files(*environments) for text in read_texts(path))


def named_files(*environments: Mapping[str, str]) -> list[Path]:
    """The files of a site's texts that the first of `environments` names which names any."""
    named = next((env[FAILURE_TEXTS_VARIABLE] for env in environments if env.get(FAILURE_TEXTS_VARIABLE)), "")
    return [user_path(path) for path in named.split(os.pathsep) if path]


_SENTENCE_LINES = 3

_ASIDE = re.compile(r"^.{0,60}?(?:^|[\s\[|(])(?:WARNING|INFO|DEBUG)(?=[\s\]|):-]|$)|^\S+:\d+: \w*Warning: ")
"""A line of Python's logging or warnings that is no error. Libraries of networks (NCCL WARN) warn of their end."""


def without_asides(lines: Iterable[str]) -> list[str]:
    """Lines that a program printed, without those that it marks as less than an error: it went on after them."""
    return [line for line in lines if not _ASIDE.match(line)]


def find_text(texts: Iterable[FailureText], lines: Sequence[str]) -> tuple[FailureText, str, re.Match[str]] | None:
    """The first of the texts that any of the lines has, with the line and the match."""
    return next(((text, line.strip(), match) for text in texts for line in lines
                 if (match := text.found_in(line))), None)


def whole_sentence(line: str, lines: Sequence[str]) -> str:
    """The line, with those before and after it that belong to its sentence: Open MPI's messages break after
    commas."""
    stripped = [one.strip() for one in lines]
    if line not in stripped:
        return line
    first = last = stripped.index(line)
    while first and last - first < _SENTENCE_LINES and stripped[first - 1].endswith(","):
        first -= 1
    while last + 1 < len(stripped) and last - first < _SENTENCE_LINES and stripped[last].endswith(","):
        last += 1
    return " ".join(stripped[first:last + 1])


def left_out(texts: Iterable[FailureText]) -> list[str]:
    """What is to be said of patterns that took too long to be searched to the end."""
    return [f"  the pattern {shown(pattern.text)} of [{text.name}] ({FAILURE_TEXTS_VARIABLE}) was left out: it took"
            f" more than {MOST_S:g} s" for text in texts for pattern in text.patterns if pattern.is_over]


def read_texts(path: Path, limit_s: float | None = MOST_S) -> tuple[FailureText, ...]:
    """The texts of a file.

    Args:
        limit_s: processor time that each pattern may take; None for patterns that are known to be fast.

    Raises:
        UserError: it cannot be read, is no TOML, or a table in it is no text: with the file, the table, the key and
            what is accepted; also where a text does not fit its own examples, or takes too long to.
    """
    try:
        content = parse_toml(read_text(path), str(path))
    except UserError as error:
        raise UserError(f"cannot read a file of failure texts: {error.found}",
                        where=f"{path} ({FAILURE_TEXTS_VARIABLE})",
                        instead="a TOML file, one table for each failure: docs/reference/failures.md") from error
    return tuple(_text(name, table, path, limit_s) for name, table in content.items())


def _text(name: str, table: Any, path: Path, limit_s: float | None) -> FailureText:
    def refused(found: str, instead: str) -> UserError:
        return UserError(found, where=f"{path}, [{name}]", instead=instead)

    if not isinstance(table, dict):
        raise refused(f"{name} stands outside any table", f"[{name}] with cause, patterns, source and examples")
    for key, value in table.items():
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            raise refused(f"unknown key {key}",
                          f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or not value or (
                _KEYS[key] is list and not all(isinstance(one, str) and one for one in value)):
            raise refused(f"{key} is {value!r}", "a text" if _KEYS[key] is str else "a list of texts")
    if missing := [key for key in _REQUIRED if key not in table]:
        raise refused(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                      "every failure says its cause, its patterns, a source (a link) and an example of each")
    if table.get("kind", "peer_lost") not in _KINDS:
        raise refused(f"kind is {table['kind']!r}", f"leave it out, or one of {', '.join(_KINDS)}")
    patterns = []
    for pattern in table["patterns"]:
        try:
            patterns.append(TimedPattern(pattern, limit_s))
        except (re.error, OverflowError, RecursionError) as error:
            raise refused(f"the pattern {shown(pattern)} is no regular expression: {error}",
                          "one of Python's, in single quotes") from error
        except TimeoutError as error:
            raise refused(f"the pattern {shown(pattern)} {error}", "a shorter one") from error
    advice = table.get("advice", "")
    groups = {group for pattern in patterns for group in pattern.groups}
    if unknown := [word for word in _NAMED.findall(advice) if word not in {*groups, *_FROM_THE_RUN}]:
        raise refused(f"advice names {{{unknown[0]}}}",
                      f"a group of a pattern, (?P<{unknown[0]}>…), or one of {', '.join(_FROM_THE_RUN)}")
    text = FailureText(name, _KINDS.get(table.get("kind", "")), table["cause"], tuple(patterns), advice,
                       table["source"], tuple(table["examples"]))
    for pattern in patterns:
        has_example = any(pattern.search(example) for example in text.examples)
        if pattern.is_over:
            raise refused(f"the pattern {shown(pattern.text)} takes more than {MOST_S:g} s to be searched in the "
                          "examples", "one without a repetition inside another, such as (a+)+")
        if not has_example:
            raise refused(f"no example has the pattern {pattern.text!r}", "a line in examples for each pattern")
    if stray := [example for example in text.examples if text.found_in(example) is None]:
        raise refused(f"no pattern fits the example {stray[0]!r}", "examples that the patterns find")
    return text


def filled_in(advice: str, values: Mapping[str, str | None]) -> str:
    """An advice with the values of those {NAME}s in it that are known; the others stay."""
    return _NAMED.sub(lambda match: values.get(match[1]) or match[0], advice)
