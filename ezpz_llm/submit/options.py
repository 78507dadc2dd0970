"""Options of submit, and the `launch` command that the job runs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.base import MOST_HOSTS, MOST_REPEATS, MOST_SECONDS, UserError
from ezpz_llm.base.parser import examples, typed_name, wrapped
from ezpz_llm.launch.option_parsing import (
    Option,
    Options as LaunchOptions,
    option_lines,
    parse as parse_launch,
    split_options,
    whole,
)
from ezpz_llm.launch.schedulers import schedulers

_EXAMPLE = "ezpz-llm submit --nodes 4 --time 1:00:00 -- launch python3 -m ezpz_llm.train"

# How long a job may take.
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
    if text.isdecimal() and text.isascii():
        raise ValueError(f"a time with its unit, since PBS reads {text} as seconds and Slurm as minutes: "
                         f"{text}m for minutes; accepted are {ACCEPTED}")
    total = (86400 * found.get("days", 0) + 3600 * found.get("hours", 0) + 60 * found.get("minutes", 0)
             + found.get("seconds", 0))
    if not 0 < total <= MOST_SECONDS:
        raise ValueError(f"a time above 0: {ACCEPTED}")
    return total


_LAUNCH = (("launch",), ("ezpz-llm", "launch"), ("-m", "ezpz_llm.launch"))
_STUDY = ("ezpz-llm", "scale", "--study")
"""Goes on with a study that is there: it launches by itself, as often as the study says."""


@dataclass(frozen=True)
class Options:
    """One call of submit. `launch_words` start launch; `launch_arguments` are those after them, unchanged;
    `launch` is how launch itself will read these. For a study, which `launches` by itself, all words are arguments,
    and `launch.command`."""

    launch_words: tuple[str, ...] = ()
    launch_arguments: tuple[str, ...] = ()
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    launches: bool = False
    nodes: int = 0
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
    dry_run: bool = False
    help: bool = False


def _label(text: str) -> str:
    # What account and queue names consist of everywhere; nothing in it means anything to a shell or a scheduler.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", text):
        raise ValueError("a name of letters, digits and _ . @ + -")
    return text


def _scheduler(text: str) -> str:
    names = [name for name, scheduler in schedulers().items() if scheduler.PROGRAM]
    if text not in names:
        raise ValueError(f"one of {', '.join(names)}")
    return text


def _directive(text: str) -> str:
    if not text.startswith("-") or not text.isprintable():
        raise ValueError("an option of the scheduler's, on one line")
    return text


_OPTIONS = (
    Option(("--nodes",), "nodes", "how many nodes", "N", whole(1, MOST_HOSTS)),
    Option(("--time",), "time_s", f"how long at most: {ACCEPTED}", "T", read_duration),
    Option(("--site",), "site", "the machine's facts: a name (polaris, frontier, …) or a TOML file", "S"),
    Option(("--scheduler",), "scheduler", "whose job script: slurm, pbs, flux, lsf (default: the site's, or the"
           " first that is here)", "NAME", _scheduler),
    Option(("--directive",), "directives", "one more option of the scheduler's, as it writes them, any number of"
           " times: --directive=--mail-type=END", "WORDS", _directive, repeats=True),
    Option(("--account",), "account", "the project that pays", "A", _label),
    Option(("--queue",), "queue", "PBS's queue, Slurm's partition (on some sites its QOS)", "Q", _label),
    Option(("--reservation",), "reservation", "nodes that were set aside for you", "R", _label),
    Option(("--name",), "name", "the job's name (default: the command's)", "N"),
    Option(("--run-dir",), "run_dir", "the run directory (default: runs/<name>-<stamp>)", "D", Path),
    Option(("--requeue",), "requeue", "may be started again after a preemption or a dead node, and then continues"),
    Option(("--chain",), "chain", "queue K jobs, each to begin after the one before and continue where it stopped",
           "K", whole(1, MOST_REPEATS)),
    Option(("--dry-run",), "dry_run", "print the script and the command that would queue it; write nothing"),
    Option(("-h", "--help"), "help", "print this and end"),
)


def parse(words: Sequence[str]) -> Options:
    """Read submit's options and the launch command after them.

    Raises:
        UserError: an unknown option, an unusable or missing value, a command that does not begin with launch.
    """
    found, rest = split_options(words, _OPTIONS, _EXAMPLE + " {option}")
    if found.get("help"):
        return Options(help=True)
    for name, option in (("nodes", "--nodes N"), ("time_s", "--time H:MM:SS")):
        if name not in found:
            raise UserError(f"a job needs {option}", instead=_EXAMPLE)
    if (os.path.basename((rest or [""])[0]), *rest[1:3]) == _STUDY:
        return Options(launch_arguments=tuple(rest), launch=LaunchOptions(command=tuple(rest)), launches=True,
                       **found)
    start, arguments = _split_launch(tuple(rest))
    launch = parse_launch(arguments)
    for set_, option in ((launch.dry_run, "--dry-run"), (launch.help, "--help"), (launch.version, "--version")):
        if set_:
            raise UserError(f"the job would only run launch {option}", where="the command after --",
                            instead=f"ezpz-llm submit {option} …")
    return Options(launch_words=start, launch_arguments=arguments, launch=launch, **found)


def _split_launch(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for first in range(1, min(4, len(words)) + 1):
        start = (os.path.basename(words[0]), *words[1:first])
        is_python = start[0].startswith("python")
        if start in _LAUNCH or (is_python and start[-2:] == _LAUNCH[2]):
            return words[:first], words[first:]
    raise UserError("the job's command does not begin with launch" if words else "no command for the job",
                    where=" ".join(words[:3]) or None, instead=_EXAMPLE)


def help_text() -> str:
    """The page that `submit --help` prints."""
    name = typed_name("submit")
    return "\n".join([
        f"usage: {name} --nodes N --time T [options] [--] launch [its options] COMMAND ARGUMENTS…", "",
        wrapped("Check COMMAND, write a job script into the run directory, and queue it: sbatch, qsub, flux batch "
                "or bsub."), "",
        *option_lines(_OPTIONS), "",
        wrapped("Exit code: 0 once the job is queued; 2 where the command or the request is wrong; 1 where the "
                "scheduler refuses the job."), "",
        examples(("ezpz-llm submit --nodes 4 --time 1:00:00 --account A -- launch python3 -m ezpz_llm.train",
                  "ezpz-llm submit --nodes 4 --time 1:00:00 --dry-run -- launch python3 x.py  print the script")),
    ])
