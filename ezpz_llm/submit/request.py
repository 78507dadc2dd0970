"""What a job asks its scheduler for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base.schema import MOST_SECONDS


@dataclass(frozen=True)
class Request:
    """`time_s` is the limit in seconds; `devices` the accelerators of a node, None where the site does not say;
    `output` the folder for what the job prints."""

    name: str
    nodes: int
    time_s: int
    output: Path
    account: str | None
    queue: str | None
    reservation: str | None
    requeue: bool
    devices: int | None


# How long a job may take: what a user may type, and how the schedulers write it.
_CLOCK = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<hours>\d{1,9}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)",
                    re.ASCII)
_UNITS = re.compile(r"(?:(?P<days>\d{1,9})d)?(?:(?P<hours>\d{1,9})h)?(?:(?P<minutes>\d{1,9})m)?", re.ASCII)

ACCEPTED = "H:MM:SS, D-HH:MM:SS, or units such as 90m, 12h, 1d12h"


def read_duration(text: str) -> int:
    """Seconds. A lone number and `1:30` are refused: PBS and Slurm read them differently, and so do people.

    Raises:
        ValueError: with what is accepted.
    """
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    found = {unit: int(number) for unit, number in (match.groupdict() if match else {}).items() if number}
    if "-" in text and found.get("hours", 0) > 23:
        found = {}
    total = (86400 * found.get("days", 0) + 3600 * found.get("hours", 0) + 60 * found.get("minutes", 0)
             + found.get("seconds", 0))
    if not 0 < total <= MOST_SECONDS:
        raise ValueError(f"a time above 0: {ACCEPTED}")
    return total


def clock(seconds: int) -> str:
    """H:MM:SS, as both schedulers read it; the hours may have any number of digits."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def clock_with_days(seconds: int) -> str:
    """D-HH:MM:SS from one day on, which Slurm prefers to many hours; else H:MM:SS."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}" if days else clock(rest)
