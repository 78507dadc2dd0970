"""What is to be started, in words that belong to no launcher; and what a dialect makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.launch.placement import Placement

HOSTS_ON_THE_LINE = 8
"""Longer host lists go into a file in the run directory."""


@dataclass(frozen=True)
class Work:
    """Ranks to start.

    `command` is the shim with the user's words; `here` is true where no host needs a name, since all ranks run
    on this one; `cores_per_rank` is None where it is not known; `variables` are the names that ranks on other
    hosts need too.
    """

    command: tuple[str, ...]
    placement: Placement
    here: bool
    hosts_file: Path
    cores_per_rank: int | None
    variables: Sequence[str]
    as_root: bool


@dataclass(frozen=True)
class Built:
    """A command line; the environment it needs besides (name to value and reason); files to write before."""

    argv: tuple[str, ...]
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, and how to talk to it."""

    kind: str
    dialect: str
    program: str
    source: str
    build: Callable[[str, Work], Built]
