"""Kind of a rank's failure: a pure function from its record to the kind and the evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ezpz_llm.base import EXIT_PREFLIGHT, EXIT_USAGE
from ezpz_llm.launch.failures.facts import Failure
from ezpz_llm.launch.failures.kinds import FOLLOWERS, Kind
from ezpz_llm.launch.failures.texts import (
    FailureText,
    filled_in,
    find_text,
    shipped_texts,
    whole_sentence,
    without_asides,
)
from ezpz_llm.launch.failures.tracebacks import before_the_report


@dataclass(frozen=True)
class Finding:
    """A kind, and the words that show it. `cause` says it in plain words and `advice` what helps, where a known
    text does (`name`); an advice's {NAME}s that are of the run, not of the words, are still in it."""

    kind: Kind
    evidence: str
    cause: str = ""
    advice: str = ""
    name: str = ""


_KILLED_CODE = 137
_KILLED_CHILD = re.compile(r"killed by signal: Killed|exit code: -9|Killed$")
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:? ?)?[\w.]*(?:Error|Exception): ")
"""A line that names an exception tells the cause before the lines of a log do, which went on."""
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
"""What a rank brings upon itself: a library that has just failed often goes on into one of these."""
_NEAR_A_CRASH = 10
_LOGGED_WARNING = re.compile(r"^(?:\[rank\d+\]:? ?)?\[[WI](?:\d{4})? ")
"""Of torch's C++ logger: names that resolve late and the like, which every start of a run prints."""
_TROUBLE = re.compile(r"(?i)\b(?:errors?|fail(?:s|ed|ure)?|cannot|can't|could not|unable|invalid|corrupt(?:ed)?"
                      r"|denied|exceed(?:s|ed)?|overflow|fatal|out of|not (?:found|supported|enough))\b")


def classify(failure: Failure, texts: Iterable[FailureText] | None = None) -> Finding:
    """Tell why this rank ended, from its record alone and the known `texts` (those of the package)."""
    raised = failure.exception
    said = ([raised.line, *raised.message.split("\n")[1:], raised.caused_by or ""] if raised
            else sorted(without_asides(failure.tail), key=lambda line: not _EXCEPTION.match(line)))
    if failure.oom_killed and (failure.exit_code == _KILLED_CODE or _first(_KILLED_CHILD, [*said, *failure.tail])):
        return Finding(Kind.OOM_KILLED, failure.oom_killed)
    if failure.ended_by is not None:
        return Finding(Kind.STOPPED if failure.ended_by == "launch" else Kind.TERMINATED, failure.ended_by)
    if failure.signal == "SIGABRT":
        # What calls abort() says why in a line of its own, if at all.
        said += without_asides(failure.tail)
    elif failure.signal is not None:
        # A rank that another process kills says nothing: its last words are about something else.
        said = _before_a_crash(failure)
    plain = _by_its_end(failure)
    known = tuple(shipped_texts() if texts is None else texts)
    # No loss of a peer crashes a rank.
    of_words = [text for text in known if text.kind not in FOLLOWERS] if has_crashed(failure) else known
    by_signal = f"signal {failure.signal}"
    found = find_text(of_words, said) or find_text(known, [by_signal])
    if found is None:
        return plain
    text, line, match = found
    is_own = text.kind is None and (line == by_signal or (raised is not None and not has_crashed(failure)))
    return Finding(text.kind or plain.kind, plain.evidence if is_own else whole_sentence(line, failure.tail),
                   text.cause, filled_in(text.advice, match.groupdict()), text.name)


def has_crashed(failure: Failure) -> bool:
    """Did it end by a signal that a rank brings upon itself?"""
    return failure.signal in _CRASHES


def words_before_a_crash(failure: Failure) -> list[str]:
    """The last line before a rank crashed that sounds like trouble, if one does."""
    return [line.strip() for line in _before_a_crash(failure) if _TROUBLE.search(line)][-1:]


def _before_a_crash(failure: Failure) -> list[str]:
    if not has_crashed(failure):
        return []
    lines = without_asides(before_the_report(failure.tail)[-_NEAR_A_CRASH:])
    return [line for line in lines if not _LOGGED_WARNING.match(line)]


def _by_its_end(failure: Failure) -> Finding:
    raised = failure.exception
    if failure.signal is not None:
        return Finding(Kind.SIGNAL, raised.line if raised else failure.signal)
    return _by_code(failure) if raised is None else Finding(Kind.EXCEPTION, raised.line)


def _by_code(failure: Failure) -> Finding:
    last = failure.tail[-1] if failure.tail else ""
    error = next((line for line in reversed(failure.tail) if line.startswith("error: ")), None)
    if failure.exit_code in (126, 127):
        return Finding(Kind.NOT_FOUND, last)
    if failure.exit_code == EXIT_PREFLIGHT and error:
        return Finding(Kind.WRONG_WORLD, error)
    if failure.exit_code == EXIT_USAGE and error:
        return Finding(Kind.USAGE, error)
    return Finding(Kind.EXIT, error or last)


def _first(pattern: re.Pattern[str], lines: list[str]) -> str | None:
    return next((line.strip() for line in lines if pattern.search(line)), None)


def what_was_lost(evidence: str) -> str:
    """A peer's loss in two or three words, the same for all ranks that saw it alike."""
    words = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
             "remote process exited", "communicator was aborted", "timed out", "connection was likely closed")
    lower = evidence.lower()
    return next((word for word in words if word in lower), "connection lost")
