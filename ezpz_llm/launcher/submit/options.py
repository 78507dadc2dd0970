"""Options of submit, and the `launch` command that the job runs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.core.base import MAX_NODES, MAX_REPEATS, MAX_SECONDS, UserError
from ezpz_llm.core.base.help_pages import examples, typed_name, wrap_paragraph
from ezpz_llm.core.base.schema import MAX_RANKS_PER_NODE
from ezpz_llm.launcher.jobs.option_parsing import (
    Option,
    Options as LaunchOptions,
    option_lines,
    parse as parse_launch,
    split_options,
    whole,
)
from ezpz_llm.launcher.jobs.schedulers import batch_schedulers

_EXAMPLE = "ezpz-llm submit --nodes 4 --time 1:00:00 -- launch python3 -m ezpz_llm.train"

_CLOCK = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<hours>\d{1,9}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)",
                    re.ASCII)
_UNITS = re.compile(r"(?:(?P<days>\d{1,9})d)?(?:(?P<hours>\d{1,9})h)?(?:(?P<minutes>\d{1,9})m)?", re.ASCII)

ACCEPTED = "H:MM:SS, D-HH:MM:SS, or units such as 90m, 12h, 1d12h"


def read_duration(text: str) -> int:
    """Parse a duration into seconds. Rejects "90" and "1:30", because PBS and Slurm read them differently.

    Raises:
        ValueError: invalid duration, or one that is 0 or too long.
    """
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    parts = {unit: int(number) for unit, number in (match.groupdict() if match else {}).items() if number}
    if "-" in text and parts.get("hours", 0) > 23:
        parts = {}
    if text.isdecimal() and text.isascii():
        raise ValueError(f"a time with a unit (PBS would read {text} as seconds, Slurm as minutes)",
                         f"{text}m for minutes, or {ACCEPTED}")
    if not parts:
        raise ValueError("a duration", ACCEPTED)
    total = (86400 * parts.get("days", 0) + 3600 * parts.get("hours", 0) + 60 * parts.get("minutes", 0)
             + parts.get("seconds", 0))
    if not 0 < total <= MAX_SECONDS:
        raise ValueError(f"a duration of more than 0 and at most {MAX_SECONDS} s")
    return total


_LAUNCH = (("launch",), ("ezpz-llm", "launch"), ("-m", "ezpz_llm.launch"))
_STUDY = ("ezpz-llm", "scale", "--study")
"""Command that continues an existing study. It calls launch itself, as often as the study requires."""


@dataclass(frozen=True)
class Options:
    """Parsed command line of submit.

    Attributes:
        launch_words: the words that start launch.
        launch_arguments: the words after them, unchanged; for a study, all words of the command.
        launch: the arguments as launch will parse them; for a study, `launch.command` has all words.
        is_study: the command is a study, which calls launch itself.
    """

    launch_words: tuple[str, ...] = ()
    launch_arguments: tuple[str, ...] = ()
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    is_study: bool = False
    nodes: int = 0
    gpus_per_node: int | None = None
    time_s: int = 0
    site: str | None = None
    scheduler: str | None = None
    directives: tuple[str, ...] = ()
    account: str | None = None
    queue: str | None = None
    reservation: str | None = None
    name: str | None = None
    run_dir: Path | None = None
    requeue: bool = False
    chain: int = 1
    state: Path | None = None
    dry_run: bool = False
    help: bool = False


def _label(text: str) -> str:
    # Enough for account and queue names at all sites, and no character is special to a shell or a scheduler.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", text):
        raise ValueError("a name of letters, digits and _ . @ + -")
    return text


def _scheduler(text: str) -> str:
    if text not in batch_schedulers():
        raise ValueError(f"one of {', '.join(batch_schedulers())}")
    return text


def _directive(text: str) -> str:
    if not text.startswith("-") or not text.isprintable():
        raise ValueError("an option of the scheduler, on one line")
    return text


_OPTIONS = (
    Option(("--nodes",), "nodes", "number of nodes", "N", whole(1, MAX_NODES)),
    Option(("--gpus-per-node",), "gpus_per_node", "accelerators to request per node (default: the site's number)",
           "N", whole(1, MAX_RANKS_PER_NODE)),
    Option(("--time",), "time_s", f"time limit: {ACCEPTED}", "T", read_duration),
    Option(("--site",), "site", "description of the machine: a name (polaris, frontier, …) or a TOML file", "S"),
    Option(("--scheduler",), "scheduler", "scheduler: slurm, pbs, flux, lsf (default: the site's, else the first"
           " on PATH)", "NAME", _scheduler),
    Option(("--directive",), "directives", "additional option for the scheduler, repeatable:"
           " --directive=--mail-type=END", "OPTION", _directive, repeats=True),
    Option(("--account",), "account", "project to charge", "A", _label),
    Option(("--queue",), "queue", "PBS queue or Slurm partition (QOS at some sites)", "Q", _label),
    Option(("--reservation",), "reservation", "reservation to use", "R", _label),
    Option(("--name",), "name", "job name (default: the command's name)", "N"),
    Option(("--run-dir",), "run_dir", "run directory (default: runs/<name>-<stamp>)", "D", Path),
    Option(("--requeue",), "requeue", "let the scheduler restart the job after a preemption or node failure, to"
           " resume the run"),
    Option(("--chain",), "chain", "queue K jobs that run one after another; each continues the run of the previous"
           " one", "K", whole(1, MAX_REPEATS)),
    Option(("--state",), "state", "only print the state of a job's run, for job scripts: new, resume, restart or"
           " complete", "D", Path),
    Option(("--dry-run",), "dry_run", "print the script and the submit command; write nothing"),
    Option(("-h", "--help"), "help", "print this help and exit"),
)


def parse(words: Sequence[str]) -> Options:
    """Parse submit's options and the launch command after them.

    Raises:
        UserError: an unknown option, an invalid or missing value, or a command that does not begin with launch.
    """
    values, command = split_options(words, _OPTIONS, _EXAMPLE + " {option}")
    if values.get("help"):
        return Options(help=True)
    if "state" in values:
        return Options(state=values["state"])
    for name, option in (("nodes", "--nodes N"), ("time_s", "--time H:MM:SS")):
        if name not in values:
            raise UserError(f"{option} is required", instead=_EXAMPLE)
    if (os.path.basename((command or [""])[0]), *command[1:3]) == _STUDY:
        return Options(launch_arguments=tuple(command), launch=LaunchOptions(command=tuple(command)), is_study=True,
                       **values)
    start, arguments = _split_launch(tuple(command))
    launch = parse_launch(arguments)
    for is_set, option, command_here in ((launch.dry_run, "--dry-run", "ezpz-llm submit --dry-run …"),
                                         (launch.help, "--help", "ezpz-llm submit --help"),
                                         (launch.version, "--version", "ezpz-llm --version")):
        if is_set:
            raise UserError(f"the job would only run launch {option}", where="the command after --",
                            instead=command_here)
    return Options(launch_words=start, launch_arguments=arguments, launch=launch, **values)


def _split_launch(command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for first in range(1, min(4, len(command)) + 1):
        start = (os.path.basename(command[0]), *command[1:first])
        is_python = start[0].startswith("python")
        if start in _LAUNCH or (is_python and start[-2:] == _LAUNCH[2]):
            return command[:first], command[first:]
    raise UserError("the command does not begin with launch" if command else "the command is missing",
                    where=" ".join(command[:3]) or None, instead=_EXAMPLE)


def help_text() -> str:
    """Return the text of `submit --help`."""
    name = typed_name("submit")
    return "\n".join([
        f"usage: {name} --nodes N --time T [options] [--] launch [its options] COMMAND ARGUMENTS…", "",
        wrap_paragraph("Check COMMAND, write a job script to the run directory, and submit it with sbatch, qsub, "
                       "flux batch or bsub."), "",
        *option_lines(_OPTIONS), "",
        wrap_paragraph("Exit code: 0 if the job is queued, or after --dry-run; 2 if the command or an option is "
                       "invalid; 1 if the scheduler rejects the job."), "",
        examples(("ezpz-llm submit --nodes 4 --time 1:00:00 --account A -- launch python3 -m ezpz_llm.train",
                  "ezpz-llm submit --nodes 4 --time 1:00:00 --dry-run -- launch python3 x.py  print the script")),
    ])
