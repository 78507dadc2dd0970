"""What the user typed: launch's own options, up to the first word that is none, and then the command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError, nearest

LAUNCHERS = ("auto", "mpiexec", "srun", "torchrun")
SCHEDULERS = ("auto", "slurm", "pbs", "none")
BINDINGS = ("auto", "none")
TEES = ("0", "all", "none")


@dataclass(frozen=True)
class Options:
    """One call of launch. `command` holds the user's words unchanged."""

    command: tuple[str, ...] = ()
    ranks: int | None = None
    per_host: int | None = None
    nodes: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    scheduler: str = "auto"
    launcher: str = "auto"
    site: str | None = None
    interface: str | None = None
    binding: str = "auto"
    tee: str = "0"
    idle_limit_s: float | None = None
    preflight: bool = False
    stage_env: bool = False
    wrap: tuple[str, ...] = ()
    run_dir: Path | None = None
    dry_run: bool = False
    as_json: bool = False
    explain: bool = False
    help: bool = False


@dataclass(frozen=True)
class _Option:
    words: tuple[str, ...]
    field: str
    help: str
    value: str | None = None
    convert: Callable[[str], Any] = str


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError("a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("a number of seconds above 0")
    return seconds


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return convert


def _words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not words:
        raise ValueError("a command line")
    return words


_OPTIONS = (
    _Option(("-n",), "ranks", "ranks in all", "N", _count),
    _Option(("--ppn",), "per_host", "ranks a host", "P", _count),
    _Option(("--nodes",), "nodes", "use the first K hosts only", "K", _count),
    _Option(("--hosts",), "hosts", "use these hosts of the reservation only: n1,n3 or n[1-4]", "LIST"),
    _Option(("--hostfile",), "hostfile", "hosts to use, one a line: host, host slots=N or host:N", "F", Path),
    _Option(("--scheduler",), "scheduler", f"whose reservation this is: {', '.join(SCHEDULERS)}", "NAME",
            _one_of(SCHEDULERS)),
    _Option(("--launcher",), "launcher", f"what starts the ranks: {', '.join(LAUNCHERS)}", "NAME",
            _one_of(LAUNCHERS)),
    _Option(("--site",), "site", "the machine's facts: a name (polaris, frontier, …) or a TOML file", "NAME"),
    _Option(("--interface",), "interface", "the network interface that ranks meet and talk on, e.g. hsn0", "NAME"),
    _Option(("--bind",), "binding", "ranks to cores: auto (from the topology) or none", "HOW", _one_of(BINDINGS)),
    _Option(("--tee",), "tee", "whose output the console shows: 0, all, none (files have all of it)", "WHO",
            _one_of(TEES)),
    _Option(("--timeout-idle",), "idle_limit_s",
            "end the run, with code 124, after S seconds without a sign of life", "S", _seconds),
    _Option(("--preflight",), "preflight", "first check every host, device and link; code 3 if one is unfit"),
    _Option(("--stage-env",), "stage_env", "first copy the environment to each host's own disk, and run from there"),
    _Option(("--wrap",), "wrap", 'put these words before the command on each rank: "apptainer exec x.sif"',
            "WORDS", _words),
    _Option(("--run-dir",), "run_dir", "the run directory (default: runs/<name>-<stamp>)", "D", Path),
    _Option(("--dry-run",), "dry_run", "print what would run; start nothing, write nothing"),
    _Option(("--json",), "as_json", "with --dry-run: print it as JSON"),
    _Option(("--explain",), "explain", "print what --dry-run prints, and then run"),
    _Option(("-h", "--help"), "help", "print this and end"),
)


def parse(words: Sequence[str]) -> Options:
    """Split `words` into launch's options and the command.

    Options end at the first word that does not begin with a dash, or after `--`; all that follows belongs to the
    command. `--option=value` is read as `--option value`; nothing can be abbreviated.

    Raises:
        UserError: an unknown option (the nearest is offered), a missing or unusable value, no command.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = _find(name)
        if option.value is None:
            if equals:
                raise UserError(f"{name} takes no value, but was given {value!r}", instead=name)
            found[option.field] = True
            continue
        if not equals:
            if not rest:
                raise UserError(f"{name} needs a value", instead=f"{name} {option.value}")
            value = rest.pop(0)
        try:
            found[option.field] = option.convert(value)
        except ValueError as error:
            raise UserError(f"{name} {value!r} is not {error}", instead=f"{name} {option.value}") from error
    options = Options(command=tuple(rest), **found)
    if not options.command and not options.help:
        raise UserError("no command to launch", instead="launch [options] python3 train.py … (see launch --help)")
    if options.as_json and not options.dry_run:
        raise UserError("--json says how --dry-run prints", instead="launch --dry-run --json …")
    return options


def _find(name: str) -> _Option:
    for option in _OPTIONS:
        if name in option.words:
            return option
    near = nearest(name, [word for option in _OPTIONS for word in option.words])
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"unknown option {name}",
                    instead=f"{hint}(options of the command come after it: launch -n 2 python3 x.py {name})")


def help_text() -> str:
    """The page that `launch --help` prints."""
    lines = ["usage: launch [options] [--] COMMAND ARGUMENTS…", "",
             "Start COMMAND on every rank of the reservation that this shell stands in: Slurm, PBS, a hostfile,",
             "or this machine alone. Options end at the first word that is not one: the rest is COMMAND's.", ""]
    for option in _OPTIONS:
        words = ", ".join(option.words) + (f" {option.value}" if option.value else "")
        lines.append(f"  {words:<20}  {option.help}")
    lines += ["", "Exit code: the first failing rank's; 128 + the signal's number where a signal ended it; 124",
              "after an idle timeout; 2 for a usage error."]
    return "\n".join(lines)
