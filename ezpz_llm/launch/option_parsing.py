"""Command line of launch: its own options, up to the first word that is none, and then the user's command."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import (
    MOST_HOSTS,
    MOST_RANKS,
    MOST_RANKS_ON_A_HOST,
    MOST_SECONDS,
    UserError,
    user_path,
    whole_number,
)
from ezpz_llm.base.parser import examples, help_width, typed_name, wrapped
from ezpz_llm.base.synonyms import unknown_option
from ezpz_llm.launch.schedulers import SCHEDULERS as OURS, schedulers, step_launchers


# Reading options off the front of a command line whose rest belongs to another command.
@dataclass(frozen=True)
class Option:
    """One option: `words` spell it, `field` names its value, `value` is how the help calls that (None: it takes
    none). `convert` raises ValueError with what is accepted. `old_name` still works, and says the new one. One that
    `repeats` has all its values in a tuple."""

    words: tuple[str, ...]
    field: str
    help: str
    value: str | None = None
    convert: Callable[[str], Any] = str
    old_name: str = ""
    repeats: bool = False


def split_options(words: Sequence[str], options: Sequence[Option],
                  example: str) -> tuple[dict[str, Any], list[str]]:
    """The values of the options that `words` begin with, by field, and the words after them.

    Options end at the first word that does not begin with a dash, or after `--`. `--option=value` is read as
    `--option value`; nothing can be abbreviated. `example` shows, after an unknown `{option}`, where it belongs.

    Raises:
        UserError: an unknown option (the nearest is offered), a missing or unusable value.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = _find(name, options, example)
        if name == option.old_name:
            _say_renamed(name, option.words[0])
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
            converted = option.convert(value)
            found[option.field] = (*found.get(option.field, ()), converted) if option.repeats else converted
        except ValueError as error:
            raise UserError(f"{name} {value!r} is not {error}", instead=f"{name} {option.value}") from error
        if not value:
            # Mostly a shell's variable that is not set.
            raise UserError(f"the value of {name} is empty", instead=f"{name} {option.value}")
    return found, rest


def _find(name: str, options: Sequence[Option], example: str) -> Option:
    for option in options:
        if name in (*option.words, option.old_name):
            return option
    known = [word for option in options for word in option.words]
    raise unknown_option(name, known,
                         remark=f"(options of the command come after it: {example.format(option=name)})")


# Options on a command line, read and left out; each takes one value, as `--name value` or `--name=value`.
def value_of(words: Sequence[str], *options: str) -> str | None:
    """Return the value of an option under any of its names, the last where it is given several times, or None."""
    found = None
    for position, word in enumerate(words):
        if word in options and position + 1 < len(words):
            found = words[position + 1]
        elif word.startswith(tuple(f"{option}=" for option in options)):
            found = word.partition("=")[2]
    return found


def without(words: Sequence[str], *options: str) -> tuple[str, ...]:
    """`words` less these options and their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return tuple(kept)


@functools.cache
def _say_renamed(old_name: str, name: str) -> None:
    """Once, although a command line may be read twice."""
    print(f"note: {old_name} is now {name}; the old name goes in the next release", file=sys.stderr, flush=True)


def option_lines(options: Sequence[Option]) -> list[str]:
    """The options as a help page lists them."""
    return [textwrap.fill(f"  {', '.join(option.words) + ' ' + (option.value or ''):<20}  {option.help}",
                          help_width(), subsequent_indent=" " * 24, break_on_hyphens=False) for option in options]


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    def convert(text: str) -> int:
        value = whole_number(text)
        if value is None or value < least:
            raise ValueError(f"a whole number, {least} or more")
        if value > most:
            raise ValueError(f"a whole number, {most:,} at most")
        return value

    return convert


def number(most: float, what: str) -> Callable[[str], float]:
    """A number above 0, `most` at most; `what` says so."""
    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= most:
                return float(text)
        raise ValueError(what)

    return convert


seconds = number(MOST_SECONDS, "a number of seconds above 0, and less than ten years")


def seconds_or_never(text: str) -> float:
    """A number of seconds, 0 for no limit."""
    try:
        return 0.0 if float(text) == 0 else seconds(text)
    except ValueError:
        raise ValueError("a number of seconds, or 0 for no limit") from None


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """One of the names."""
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text

    return convert


def command_line(text: str) -> tuple[str, ...]:
    """Words as a shell would split them."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not words:
        raise ValueError("a command line")
    return words


LAUNCHERS = ("auto", "mpiexec", "srun", "flux", "jsrun", "torchrun")
SCHEDULERS = ("auto", *(scheduler.NAME for scheduler in OURS), "none")
"""Without those of other packages, which are not looked for unless one is named."""
BINDINGS = ("auto", "none")
TEES = ("0", "all", "none")


def scheduler_choices() -> tuple[str, ...]:
    """What --scheduler takes."""
    return ("auto", *schedulers(), "none")


def launcher_choices() -> tuple[str, ...]:
    """What --launcher takes: also the own launchers of schedulers that other packages bring."""
    return tuple(dict.fromkeys((*LAUNCHERS, *step_launchers())))


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
    start_limit_s: float = 600.0
    preflight: bool = False
    stage_env: bool = False
    container: str | None = None
    wrap: tuple[str, ...] = ()
    run_dir: Path | None = None
    dry_run: bool = False
    no_check: bool = False
    as_json: bool = False
    explain: bool = False
    verbose: bool = False
    version: bool = False
    help: bool = False


_OPTIONS = (
    Option(("-n",), "ranks", "ranks in all", "N", whole(1, MOST_RANKS)),
    Option(("--ppn",), "per_host", "ranks a host", "P", whole(1, MOST_RANKS_ON_A_HOST)),
    Option(("--nodes",), "nodes", "use the first K hosts only", "K", whole(1, MOST_HOSTS)),
    Option(("--hosts",), "hosts", "use these hosts of the reservation only: n1,n3 or n[1-4]", "LIST"),
    Option(("--hostfile",), "hostfile", "hosts to use, one a line: host, host slots=N or host:N", "F", Path),
    Option(("--scheduler",), "scheduler", f"whose reservation this is: {', '.join(SCHEDULERS)}", "NAME",
            lambda text: one_of(scheduler_choices())(text)),
    Option(("--launcher",), "launcher", f"what starts the ranks: {', '.join(LAUNCHERS)}", "NAME",
            lambda text: one_of(launcher_choices())(text)),
    Option(("--site",), "site", "the machine's facts: a name (polaris, frontier, …) or a TOML file", "NAME"),
    Option(("--interface",), "interface", "the network interface that ranks meet and talk on, e.g. hsn0", "NAME"),
    Option(("--bind",), "binding", "ranks to cores: auto (from the topology) or none", "HOW", one_of(BINDINGS)),
    Option(("--tee",), "tee", "whose output the console shows: 0, all, none (files have all of it)", "WHO",
            one_of(TEES)),
    Option(("--idle-timeout",), "idle_limit_s",
           "end the run, with code 124, after S seconds without a sign of life", "S", seconds, "--timeout-idle"),
    Option(("--start-timeout",), "start_limit_s",
           "end the run, with code 124, if a rank has not started after S seconds (default: 600; 0: never)", "S",
           seconds_or_never, "--timeout-start"),
    Option(("--preflight",), "preflight", "first check every host, device and link; code 3 if one is unfit"),
    Option(("--stage-env",), "stage_env", "first copy the environment to each host's own disk, and run from there"),
    Option(("--container",), "container",
           "run ranks in this image, as the site's file says how (else apptainer or singularity); none: in none",
           "IMAGE"),
    Option(("--wrap",), "wrap", 'put these words before the command on each rank: "apptainer exec x.sif"',
            "WORDS", command_line),
    Option(("--run-dir",), "run_dir", "the run directory (default: runs/<name>-<stamp>)", "D", Path),
    Option(("--dry-run",), "dry_run", "print what would run, and check the command; start nothing, write nothing"),
    Option(("--no-check",), "no_check", "with --dry-run: leave out the command's own check"),
    Option(("--json",), "as_json", "with --dry-run: print it as JSON"),
    Option(("--explain",), "explain", "print what --dry-run prints and what the command's check says, then run"),
    Option(("--verbose",), "verbose", "print the launcher, the binding and the command, with the source of each"),
    Option(("--version",), "version", "print the version and end"),
    Option(("-h", "--help"), "help", "print this and end"),
)


def parse(words: Sequence[str]) -> Options:
    """Split `words` into launch's options and the command (see words.split_options); all that follows the options
    belongs to the command.

    Raises:
        UserError: an unknown option (the nearest is offered), a missing or unusable value, no command.
    """
    found, rest = split_options(words, _OPTIONS, "launch -n 2 python3 x.py {option}")
    options = Options(command=tuple(rest), **found)
    if not options.command and not options.help and not options.version:
        raise UserError("no command to launch", instead="launch [options] python3 train.py … (see launch --help)")
    if options.command and not options.command[0]:
        raise UserError("the command to launch is an empty word", where="a shell variable that is not set?",
                        instead="launch [options] python3 train.py …")
    if options.as_json and not options.dry_run:
        raise UserError("--json says how --dry-run prints", instead="launch --dry-run --json …")
    if options.no_check and not options.dry_run:
        raise UserError("--no-check belongs to --dry-run: a start is always checked",
                        instead="launch --dry-run --no-check …")
    return options


def help_text() -> str:
    """The page that `launch --help` prints."""
    return "\n".join([
        f"usage: {typed_name('launch')} [options] [--] COMMAND ARGUMENTS…", "",
        wrapped("Start COMMAND on every rank of the reservation that this shell stands in: Slurm, PBS, a hostfile, "
                "or this machine alone. Options end at the first word that is not one: the rest is COMMAND's."), "",
        *option_lines(_OPTIONS), "",
        wrapped("Exit code: the first failing rank's; 128 + the signal's number where a signal ended it; 124 after "
                "a timeout; 3 where a rank cannot be started; 2 for a usage error."), "",
        examples(("launch -n 2 python3 -m ezpz_llm.train  two ranks, on this machine or in a job",
                  "launch --dry-run python3 train.py  what would run, and why",
                  "launch --nodes 2 --ppn 4 python3 train.py")),
    ])


_PACKAGE = "ezpz_llm"
_SCRIPT = "ezpz-llm"


@dataclass(frozen=True)
class Target:
    """`module` is set for one of our own commands, such as "ezpz_llm.train"; `name` names the run."""

    name: str
    module: str | None
    arguments: tuple[str, ...]


def read_command(words: tuple[str, ...]) -> Target:
    """Recognise `python3 [flags] -m ezpz_llm.COMMAND …` and `ezpz-llm COMMAND …`.

    Raises:
        UserError: no word.
    """
    if not words:
        raise UserError("no command to launch", instead="launch [options] python3 train.py … (see launch --help)")
    program = os.path.basename(words[0])
    if program == _SCRIPT and len(words) > 1 and not words[1].startswith("-"):
        name = words[1].replace("-", "_")
        return Target(name, f"{_PACKAGE}.{name}", words[2:])
    return _python_target(words) if program.startswith("python") else Target(program, None, words[1:])


def _python_target(words: tuple[str, ...]) -> Target:
    position = 1
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        if word == "-m" and position + 1 < len(words):
            module = words[position + 1]
            name = module.removesuffix(".__main__").rsplit(".", 1)[-1]
            ours = module.startswith(f"{_PACKAGE}.")
            return Target(name, module if ours else None, words[position + 2:])
        if word == "-c":
            return Target("python", None, words[position + 1:])
        # -X and -W take a value, in the next word unless it is attached.
        position += 2 if word in ("-X", "-W") else 1
    if position >= len(words):
        return Target("python", None, ())
    return Target(Path(words[position]).stem, None, words[position + 1:])


def program_file(words: tuple[str, ...], target: Target) -> str:
    """What of `words`, the command of `target`, is run: a script, an executable, or a module's name."""
    return words[len(words) - len(target.arguments) - 1]


def run_dir_of(target: Target, given: Path | None) -> Path | None:
    """The run directory that launch (`given`) or our own command names; None where neither does.

    Raises:
        UserError: both do, and differ.
    """
    named = value_of(target.arguments, "--run-dir") if target.module else None
    own = Path(named) if named else None
    if own is None or given is None:
        return given or own
    if user_path(own).absolute() != user_path(given).absolute():
        raise UserError(f"two run directories: {given} and {own}",
                        where=f"launch --run-dir {given}, {target.module} --run-dir {own}",
                        instead="name it once")
    return given
