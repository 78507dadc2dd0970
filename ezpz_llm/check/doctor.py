"""The list of checks, and how it is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ezpz_llm.check.reservation import Check


def run_checks(env: Mapping[str, str]) -> list[Check]:
    """All checks of this machine, in the order in which they are read."""
    from ezpz_llm.check import machine, reservation, software

    subjects = (software.checks, reservation.checks, machine.checks, machine.network_checks, software.tool_checks)
    return [check for subject in subjects for check in subject(env)]


def as_text(checks: Sequence[Check]) -> str:
    """A line a check, the remedy under it, and a last line that counts."""
    width = max(len(check.name) for check in checks) + 2
    lines = []
    for check in checks:
        lines.append(f"{check.level:<6}{check.name:<{width}}{check.found}")
        if check.instead:
            lines.append(f"{'':<6}{'':<{width}}do: {check.instead}")
    counts = Counter(check.level for check in checks)
    lines.append(f"doctor: {counts['bad']} bad, {counts['warn']} to look at, {counts['ok']} ok")
    return "\n".join(lines)
