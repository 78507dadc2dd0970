"""Known failure texts: patterns of what ranks print when they fail, with the cause and advice for each.

`texts.toml` holds the package's texts; EZPZ_LLM_FAILURE_TEXTS names the site's files.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, nearest_names, parse_toml, read_text, shorten_value, user_path
from ezpz_llm.launcher.basics.variables import FAILURE_TEXTS_VARIABLE
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.timed_pattern import MAX_S, TimedPattern

_KINDS = {kind.name.lower(): kind for kind in (
    Kind.DEVICE_MEMORY, Kind.HOST_MEMORY, Kind.MISSING_MODULE, Kind.DISK_FULL, Kind.DEVICE_BROKEN, Kind.PORT_TAKEN,
    Kind.NOT_FOUND, Kind.COLLECTIVE_TIMEOUT, Kind.PEER_LOST)}
_RUN_PLACEHOLDERS = ("run_dir", "hosts", "leave_out", "path", "elsewhere", "less_memory")
"""Placeholders allowed in `advice` besides the groups of its patterns; failures/advice.py fills them in."""
_KEYS = {"kind": str, "cause": str, "patterns": list, "advice": str, "source": str, "examples": list}
_REQUIRED = ("cause", "patterns", "source", "examples")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class FailureText:
    """Known failure, recognized by its output.

    Attributes:
        kind: None if the rank's exit (exception, signal or code) determines the kind.
        advice: may hold {NAME}: a group of a pattern, or one of `_RUN_PLACEHOLDERS`.
        source: a link to a page or issue that documents the failure.
        examples: lines as ranks print them.
    """

    name: str
    kind: Kind | None
    cause: str
    patterns: tuple[TimedPattern, ...]
    advice: str
    source: str
    examples: tuple[str, ...]

    def search(self, line: str) -> re.Match[str] | None:
        """Return the first match of the patterns in a line."""
        return next((match for pattern in self.patterns if (match := pattern.search(line))), None)


@functools.cache
def shipped_texts() -> tuple[FailureText, ...]:
    """Return the package's texts."""
    return read_texts(Path(__file__).with_name("texts.toml"), limit_s=None)


def site_texts(*environments: Mapping[str, str]) -> tuple[FailureText, ...]:
    """Return the texts of the files in `site_files`.

    Raises:
        UserError: `read_texts` rejects a file.
    """
    return tuple(text for path in site_files(*environments) for text in read_texts(path))


def site_files(*environments: Mapping[str, str]) -> list[Path]:
    """Return the site's files, from the first of `environments` that sets EZPZ_LLM_FAILURE_TEXTS."""
    paths = next((env[FAILURE_TEXTS_VARIABLE] for env in environments if env.get(FAILURE_TEXTS_VARIABLE)), "")
    return [user_path(path) for path in paths.split(os.pathsep) if path]


_SENTENCE_LINES = 3

_NON_ERROR = re.compile(r"^.{0,60}?(?:^|[\s\[|(])(?:WARNING|INFO|DEBUG)(?=[\s\]|):-]|$)|^\S+:\d+: \w*Warning: ")
"""Lines of Python's logging or warnings below ERROR. "NCCL WARN" is not among them: it precedes failures."""


def drop_non_errors(lines: Iterable[str]) -> list[str]:
    """Drop log lines marked as less severe than an error, after which the program continued."""
    return [line for line in lines if not _NON_ERROR.match(line)]


def find_text(texts: Iterable[FailureText], lines: Sequence[str]) -> tuple[FailureText, str, re.Match[str]] | None:
    """Return the first text that matches any of the lines, with the line and the match."""
    return next(((text, line.strip(), match) for text in texts for line in lines
                 if (match := text.search(line))), None)


def join_sentence(line: str, lines: Sequence[str]) -> str:
    """Join a line with its neighbors in the same sentence: Open MPI breaks its messages after commas."""
    stripped = [text.strip() for text in lines]
    if line not in stripped:
        return line
    first = last = stripped.index(line)
    while first and last - first < _SENTENCE_LINES and stripped[first - 1].endswith(","):
        first -= 1
    while last + 1 < len(stripped) and last - first < _SENTENCE_LINES and stripped[last].endswith(","):
        last += 1
    return " ".join(stripped[first:last + 1])


def slow_pattern_notes(texts: Iterable[FailureText]) -> list[str]:
    """Return notes about patterns that exceeded their time limit."""
    return [f"  pattern {shorten_value(pattern.text)} of [{text.name}] ({FAILURE_TEXTS_VARIABLE}) was skipped: it"
            f" took more than {MAX_S:g} s" for text in texts for pattern in text.patterns if pattern.is_exhausted]


def read_texts(path: Path, limit_s: float | None = MAX_S) -> tuple[FailureText, ...]:
    """Read the texts of a file.

    Args:
        limit_s: CPU time limit of each pattern; None for patterns that are known to be fast.

    Raises:
        UserError: unreadable file, invalid TOML, or an invalid table; also if the patterns of a text do not match
            its examples, or exceed the time limit.
    """
    try:
        content = parse_toml(read_text(path), str(path))
    except UserError as error:
        raise UserError(f"cannot read failure texts: {error.found}",
                        where=f"{path} ({FAILURE_TEXTS_VARIABLE})",
                        instead="use a TOML file, one table per failure (docs/reference/failures.md)") from error
    return tuple(_parse_text(name, table, path, limit_s) for name, table in content.items())


def _parse_text(name: str, table: Any, path: Path, limit_s: float | None) -> FailureText:
    def invalid(problem: str, instead: str) -> UserError:
        return UserError(problem, where=f"{path}, [{name}]", instead=instead)

    if not isinstance(table, dict):
        raise invalid(f"{name} is outside any table",
                      f"add a table [{name}] with cause, patterns, source and examples")
    for key, value in table.items():
        if key not in _KEYS:
            near = nearest_names(key, _KEYS)
            raise invalid(f"unknown key {key}",
                          f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or not value or (
                _KEYS[key] is list and not all(isinstance(item, str) and item for item in value)):
            raise invalid(f"{key} is {value!r}",
                          "use a string" if _KEYS[key] is str else "use a list of strings")
    if missing := [key for key in _REQUIRED if key not in table]:
        raise invalid(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                      "each table requires a cause, patterns, a source (a link) and an example for each pattern")
    if table.get("kind", "peer_lost") not in _KINDS:
        raise invalid(f"kind is {table['kind']!r}", f"omit it, or use one of {', '.join(_KINDS)}")
    patterns = []
    for pattern in table["patterns"]:
        try:
            patterns.append(TimedPattern(pattern, limit_s))
        except (re.error, OverflowError, RecursionError) as error:
            raise invalid(f"pattern {shorten_value(pattern)} is not a valid regular expression: {error}",
                          "use Python syntax, in single quotes") from error
        except TimeoutError as error:
            raise invalid(f"pattern {shorten_value(pattern)} {error}", "use a shorter pattern") from error
    advice = table.get("advice", "")
    groups = {group for pattern in patterns for group in pattern.groups}
    if unknown := [name for name in _PLACEHOLDER.findall(advice) if name not in {*groups, *_RUN_PLACEHOLDERS}]:
        raise invalid(f"advice has an unknown placeholder {{{unknown[0]}}}",
                      f"add a group (?P<{unknown[0]}>…) to a pattern, or use one of {', '.join(_RUN_PLACEHOLDERS)}")
    text = FailureText(name, _KINDS.get(table.get("kind", "")), table["cause"], tuple(patterns), advice,
                       table["source"], tuple(table["examples"]))
    for pattern in patterns:
        has_example = any(pattern.search(example) for example in text.examples)
        if pattern.is_exhausted:
            raise invalid(f"pattern {shorten_value(pattern.text)} takes more than {MAX_S:g} s on the examples",
                          "avoid a repetition inside another, such as (a+)+")
        if not has_example:
            raise invalid(f"no example matches the pattern {shorten_value(pattern.text)}",
                          "add an example for each pattern")
    if unmatched := [example for example in text.examples if text.search(example) is None]:
        raise invalid(f"no pattern matches the example {shorten_value(unmatched[0])}",
                      "use examples that the patterns match")
    return text


def fill_advice(advice: str, values: Mapping[str, str | None]) -> str:
    """Replace the {NAME}s in `advice` that have a value; keep the others."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1]) or match[0], advice)
