"""Classification of a rank's failure: a pure function from its record to a kind and the evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import EXIT_PREFLIGHT, EXIT_USAGE
from ezpz_llm.launcher.basics.log_text import ERROR_WORDS
from ezpz_llm.launcher.on_nodes.kinds import CONSEQUENCE_KINDS, Kind
from ezpz_llm.launcher.on_nodes.known_failures import (
    FailureText,
    drop_non_errors,
    fill_advice,
    find_text,
    join_sentence,
    shipped_texts,
)
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised
from ezpz_llm.launcher.on_nodes.tracebacks import innermost_call, lines_before_fault_report


@dataclass(frozen=True)
class Finding:
    """A failure kind and the output that shows it.

    `cause` and `advice` come from the known text `name`; all three are empty if no known text matched. {NAME}s in
    `advice` that depend on the run are not filled in yet.
    """

    kind: Kind
    evidence: str
    cause: str = ""
    advice: str = ""
    name: str = ""


_KILLED_CODE = 137
_WRONG_WORLD = "error: launch started "
"""Error of this package in a rank. Other programs may exit with the same code."""
_KILLED_CHILD = re.compile(r"killed by signal: Killed|exit code: -9|Killed$")
_NO_SPACE = re.compile(r"No space left on device(?!.*'/(?!dev/shm))")
"""Error of a write without a path, or in /dev/shm."""
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:? ?)?[\w.]*(?:Error|Exception): ")
"""Lines that name an exception take precedence over log lines, since the program continued after those."""
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
"""Signals that a rank causes itself, often right after a library reported an error."""
_MAX_LINES_BEFORE_CRASH = 10
_LOGGED_WARNING = re.compile(r"^(?:\[rank\d+\]:? ?)?\[[WI](?:\d{4})? ")
"""Warnings of torch's C++ logger, such as slow name resolution, which are printed at every start."""


def classify(failure: Failure, texts: Iterable[FailureText] | None = None) -> Finding:
    """Classify a rank's failure by its record and the known `texts` (default: the package's)."""
    exception = failure.exception
    lines = (_exception_lines(exception, failure.tail) if exception
             else sorted(drop_non_errors(failure.tail), key=lambda line: not _EXCEPTION.match(line)))
    if failure.oom_killed and (failure.exit_code == _KILLED_CODE
                               or _first_match(_KILLED_CHILD, [*lines, *failure.tail])):
        return Finding(Kind.OOM_KILLED, failure.oom_killed)
    if failure.ended_by is not None:
        return Finding(Kind.STOPPED if failure.ended_by == "launch" else Kind.TERMINATED, failure.ended_by)
    if failure.signal == "SIGABRT":
        # A library that calls abort() prints the reason, if any, on a line of its own.
        lines += drop_non_errors(failure.tail)
    elif failure.signal is not None:
        # Only for a crash: if another process killed the rank, its last output does not explain why it ended.
        lines = _lines_before_crash(failure)
    if failure.shared_memory and (failure.signal == "SIGBUS" or _first_match(_NO_SPACE, lines)):
        lines = [failure.shared_memory]  # neither the signal nor the error names it
    by_exit = _finding_from_exit(failure)
    known_texts = tuple(shipped_texts() if texts is None else texts)
    # Losing a peer does not crash a rank.
    crashed = has_crashed(failure)
    candidates = [text for text in known_texts if text.kind not in CONSEQUENCE_KINDS] if crashed else known_texts
    by_signal = f"signal {failure.signal}"
    text_match = find_text(candidates, lines) or find_text(known_texts, [by_signal])
    if text_match is None:
        return by_exit
    text, line, match = text_match
    if exception is not None and line.startswith(exception.printed_line):
        line = exception.line  # without its innermost call
    keeps_evidence = text.kind is None and (line == by_signal or (exception is not None and not crashed))
    evidence = by_exit.evidence if keeps_evidence else join_sentence(line, failure.tail)
    return Finding(text.kind or by_exit.kind, evidence, text.cause, fill_advice(text.advice, match.groupdict()),
                   text.name)


def _exception_lines(exception: Raised, tail: Sequence[str]) -> list[str]:
    lines = [exception.printed_line, *exception.message.split("\n")[1:], exception.line, exception.caused_by or ""]
    # The same error has other causes in other calls: a missing file is a missing program if it was to be started.
    call = innermost_call(tail, exception.printed_line)
    return [*lines, *([f"{exception.printed_line} at {call}"] if call else [])]


def has_crashed(failure: Failure) -> bool:
    """Return True if the rank was ended by a signal that it caused itself, such as SIGSEGV."""
    return failure.signal in _CRASHES


def error_line_before_crash(failure: Failure) -> list[str]:
    """Return the last line before a crash that reads like an error, in a list; empty if there is none."""
    return [line.strip() for line in _lines_before_crash(failure) if ERROR_WORDS.search(line)][-1:]


def _lines_before_crash(failure: Failure) -> list[str]:
    if not has_crashed(failure):
        return []
    lines = drop_non_errors(lines_before_fault_report(failure.tail)[-_MAX_LINES_BEFORE_CRASH:])
    return [line for line in lines if not _LOGGED_WARNING.match(line)]


def _finding_from_exit(failure: Failure) -> Finding:
    exception = failure.exception
    if failure.signal is not None:
        return Finding(Kind.SIGNAL, exception.line if exception else failure.signal)
    return _finding_from_exit_code(failure) if exception is None else Finding(Kind.EXCEPTION, exception.line)


def _finding_from_exit_code(failure: Failure) -> Finding:
    error = failure.error
    if failure.exit_code in (126, 127):
        return Finding(Kind.NOT_FOUND, failure.tail[-1] if failure.tail else "")
    if failure.exit_code == EXIT_PREFLIGHT and error.startswith(_WRONG_WORLD):
        return Finding(Kind.WRONG_WORLD, error)
    if failure.exit_code == EXIT_USAGE and error.startswith("error: "):
        return Finding(Kind.USAGE, error)
    return Finding(Kind.EXIT, error)


def _first_match(pattern: re.Pattern[str], lines: list[str]) -> str | None:
    return next((line.strip() for line in lines if pattern.search(line)), None)


def summarize_lost_peer(evidence: str) -> str:
    """Summarize the loss of a peer in two or three words, so that ranks can be grouped by it."""
    summaries = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
                 "remote process exited", "communicator was aborted", "timed out", "connection was likely closed",
                 "failed with an exception")
    lower = evidence.lower()
    return next((summary for summary in summaries if summary in lower), "connection lost")
