"""Findings of preflight, doctor, and test_dist, in the format that all three print and record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.shell_commands import to_typable_text
from ezpz_llm.core.rundir.records import Finding, Level


class DoctorReport(Struct, frozen=True):
    """Output of `doctor --json`."""

    fit: bool
    findings: list[Finding]


def first_problem(topic: str, found: str, *problems: tuple[bool, Level, str]) -> Finding:
    """Return a finding for the first true problem, or `ok`. Problems are (is true, level, remedy)."""
    return next((Finding(level, topic, found, instead) for is_true, level, instead in problems if is_true),
                Finding("ok", topic, found))


def is_fit(findings: Iterable[Finding]) -> bool:
    """Return True if no finding has the level `bad`."""
    return not any(finding.level == "bad" for finding in findings)


def findings_text(findings: Iterable[Finding]) -> str:
    """Return a line per finding, followed by a line with its remedy, if any."""
    return "".join(f"{finding.level:<5} {finding.topic}: {finding.found}\n"
                   + (f"      do: {to_typable_text(finding.instead)}\n" if finding.instead else "")
                   for finding in findings)


def verdict(command: str, findings: Sequence[Finding], scope: str) -> str:
    """Return the last line of a report, such as `preflight: unfit: 1 problem, 2 warnings (8 ranks on 4 nodes)`."""
    levels = [finding.level for finding in findings]
    result = "fit" if is_fit(findings) else f"unfit: {count_noun(levels.count('bad'), 'problem')}"
    warnings = f", {count_noun(levels.count('warn'), 'warning')}" if "warn" in levels else ""
    return f"{command}: {result}{warnings} ({scope})"
