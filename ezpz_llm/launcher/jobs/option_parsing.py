"""Parser for launch's command line: options up to the first word that is not one, then the command to run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import (
    MAX_NODES,
    MAX_RANKS,
    MAX_RANKS_PER_NODE,
    MAX_SECONDS,
    UserError,
    user_path,
    whole_number,
)
from ezpz_llm.core.base.help_pages import examples, help_width, typed_name, wrap_paragraph
from ezpz_llm.core.base.synonyms import unknown_option_error
from ezpz_llm.launcher.jobs.schedulers import SCHEDULERS as OURS, schedulers, step_launchers


class Option(NamedTuple):
    """Definition of an option.

    Attributes:
        words: spellings, such as ("-h", "--help").
        field: name of its value in the result.
        value: placeholder for the value in the help text; None for a flag.
        convert: parses the value; raises ValueError with a description of valid values, and optionally with one to
            type instead.
        repeats: collect the values of all occurrences in a tuple.
    """

    words: tuple[str, ...]
    field: str
    help: str
    value: str | None = None
    convert: Callable[[str], Any] = str
    repeats: bool = False


def split_options(words: Sequence[str], options: Sequence[Option],
                  example: str) -> tuple[dict[str, Any], list[str]]:
    """Parse the leading options; return their values by field, and the remaining words.

    Options end at the first word without a leading dash, or at `--`. `--option=value` and `--option value` are
    equivalent. Options cannot be abbreviated.

    Args:
        example: command line with `{option}` where options of the command belong, for the error message.

    Raises:
        UserError: an option is unknown, or a value is missing or invalid.
    """
    values: dict[str, Any] = {}
    remaining = list(words)
    while remaining and remaining[0].startswith("-") and remaining[0] != "-":
        word = remaining.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = _find(name, options, example)
        if option.value is None:
            if equals:
                raise UserError(f"{name} takes no value, but was given {value!r}", instead=name)
            values[option.field] = True
            continue
        if not equals:
            if not remaining:
                raise UserError(f"{name} needs a value", instead=f"{name} {option.value}")
            value = remaining.pop(0)
        try:
            converted = option.convert(value)
            values[option.field] = (*values.get(option.field, ()), converted) if option.repeats else converted
        except ValueError as error:
            description, *valid = error.args
            raise UserError(f"{name} {value!r} is not {description}",
                            instead=f"{name} {valid[0] if valid else option.value}") from error
        if not value:
            # Most likely an unset shell variable.
            raise UserError(f"the value of {name} is empty", instead=f"{name} {option.value}")
    return values, remaining


def _find(name: str, options: Sequence[Option], example: str) -> Option:
    for option in options:
        if name in option.words:
            return option
    spellings = [word for option in options for word in option.words]
    raise unknown_option_error(name, spellings,
                               remark=f"(options of the command come after it: {example.format(option=name)})")


def value_of(words: Sequence[str], *options: str) -> str | None:
    """Return the value of the option with any of these names: the last value if repeated, None if absent."""
    value = None
    for position, word in enumerate(words):
        if word in options and position + 1 < len(words):
            value = words[position + 1]
        elif word.startswith(tuple(f"{option}=" for option in options)):
            value = word.partition("=")[2]
    return value


def remove_options(words: Sequence[str], *options: str) -> tuple[str, ...]:
    """Return `words` without these options and their values."""
    remaining: list[str] = []
    iterator = iter(words)
    for word in iterator:
        if word in options:
            next(iterator, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            remaining.append(word)
    return tuple(remaining)


def option_lines(options: Sequence[Option]) -> list[str]:
    """Return the lines of the help text about `options`."""
    return [textwrap.fill(f"  {', '.join(option.words) + ' ' + (option.value or ''):<20}  {option.help}",
                          help_width(), subsequent_indent=" " * 24, break_on_hyphens=False) for option in options]


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a converter for whole numbers from `least` to `most`."""
    def convert(text: str) -> int:
        """Convert a word, or raise ValueError with the accepted range."""
        value = whole_number(text)
        if value is None or value < least:
            raise ValueError(f"a whole number, {least} or more")
        if value > most:
            raise ValueError(f"a whole number, at most {most:,}")
        return value

    return convert


def number(most: float, what: str) -> Callable[[str], float]:
    """Return a converter for numbers above 0 and up to `most`; `what` describes them in the error message."""
    def convert(text: str) -> float:
        """Convert a word, or raise ValueError with the accepted range."""
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= most:
                return float(text)
        raise ValueError(what)

    return convert


seconds = number(MAX_SECONDS, "a number of seconds, above 0 and below ten years")


def _seconds_or_never(text: str) -> float:
    """Convert a number of seconds; 0 means no limit."""
    try:
        return 0.0 if float(text) == 0 else seconds(text)
    except ValueError:
        raise ValueError("a number of seconds, or 0 for no limit") from None


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """Return a converter that accepts only these names."""
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text

    return convert


def command_line(text: str) -> tuple[str, ...]:
    """Split `text` into words as a shell does."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not arguments:
        raise ValueError("a command line")
    return arguments


LAUNCHERS = ("auto", "mpiexec",
             *(launcher.program for scheduler in OURS if (launcher := scheduler.step_launcher())), "torchrun")
"""Built-in values of --launcher."""
SCHEDULERS = ("auto", *(scheduler.NAME for scheduler in OURS), "none")
"""Built-in values of --scheduler; plug-in schedulers are loaded only if --scheduler is passed."""
_BINDINGS = ("auto", "none")
_TEES = ("0", "all", "none")


def _scheduler_choices() -> tuple[str, ...]:
    """Return the values of --scheduler."""
    return ("auto", *schedulers(), "none")


def _launcher_choices() -> tuple[str, ...]:
    """Return the values of --launcher, including the launchers of plug-in schedulers."""
    return tuple(dict.fromkeys((*LAUNCHERS, *step_launchers())))


class Options(NamedTuple):
    """Parsed command line of launch; `command` has the user's words unchanged."""

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
    stdin: bool = False
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
    Option(("-n",), "ranks", "total number of ranks", "N", whole(1, MAX_RANKS)),
    Option(("--ppn",), "per_host", "ranks per node", "P", whole(1, MAX_RANKS_PER_NODE)),
    Option(("--nodes",), "nodes", "use only the first K nodes", "K", whole(1, MAX_NODES)),
    Option(("--hosts",), "hosts", "use only these nodes of the allocation: n1,n3 or n[1-4]", "LIST"),
    Option(("--hostfile",), "hostfile", "nodes to use, one per line: host, host slots=N or host:N", "F", Path),
    Option(("--scheduler",), "scheduler", f"scheduler of the allocation: {', '.join(SCHEDULERS)}", "NAME",
            lambda text: one_of(_scheduler_choices())(text)),
    Option(("--launcher",), "launcher", f"program that starts the ranks: {', '.join(LAUNCHERS)}", "NAME",
            lambda text: one_of(_launcher_choices())(text)),
    Option(("--site",), "site", "description of the site: a name (polaris, frontier, …) or a TOML file", "NAME"),
    Option(("--interface",), "interface", "network interface for rendezvous and communication, e.g. hsn0", "NAME"),
    Option(("--bind",), "binding", "binding of ranks to cores: auto (from the topology) or none", "HOW",
           one_of(_BINDINGS)),
    Option(("--tee",), "tee", "ranks whose output is printed: 0, all or none (logs have all of it)", "WHO",
            one_of(_TEES)),
    Option(("--stdin",), "stdin",
           "rank 0 reads launch's standard input (default: only a terminal); other ranks have none"),
    Option(("--idle-timeout",), "idle_limit_s",
           "end the run with exit code 124 after S seconds without a sign of life", "S", seconds),
    Option(("--start-timeout",), "start_limit_s",
           "end the run with exit code 124 if a rank has not started after S seconds (default: 600; 0: no limit)",
           "S", _seconds_or_never),
    Option(("--preflight",), "preflight", "first check every node, device and link; exit code 3 if a check fails"),
    Option(("--stage-env",), "stage_env",
           "first copy the Python environment to the local disk of each node, and run from there"),
    Option(("--container",), "container",
           "run the ranks in this image, with the runtime of the site file, else apptainer or singularity; none: no"
           " container", "IMAGE"),
    Option(("--wrap",), "wrap", 'prefix of the command on each rank: "apptainer exec x.sif"',
            "WORDS", command_line),
    Option(("--run-dir",), "run_dir", "run directory (default: runs/<name>-<stamp>)", "D", Path),
    Option(("--dry-run",), "dry_run", "print the plan and check the command, without starting or writing anything"),
    Option(("--no-check",), "no_check", "with --dry-run: skip the command's own check"),
    Option(("--json",), "as_json", "with --dry-run: print the plan as JSON"),
    Option(("--explain",), "explain", "print the plan and the output of the command's own check, then run"),
    Option(("--verbose",), "verbose", "print the launcher, the binding and the command, with the source of each"),
    Option(("--version",), "version", "print the version and exit"),
    Option(("-h", "--help"), "help", "print this help and exit"),
)


def parse(words: Sequence[str]) -> Options:
    """Parse a command line of launch; everything after the options is the command (see `split_options`).

    Raises:
        UserError: an option is unknown, a value is missing or invalid, or there is no command.
    """
    values, command = split_options(words, _OPTIONS, "launch -n 2 python3 x.py {option}")
    options = Options(command=tuple(command), **values)
    if not options.command and not options.help and not options.version:
        raise UserError("no command to launch", instead="launch [options] python3 train.py … (see launch --help)")
    if options.command and not options.command[0]:
        raise UserError("the command to launch is an empty string", where="an unset shell variable?",
                        instead="launch [options] python3 train.py …")
    if options.as_json and not options.dry_run:
        raise UserError("--json requires --dry-run", instead="launch --dry-run --json …")
    if options.no_check and not options.dry_run:
        raise UserError("--no-check requires --dry-run: a real run is always checked",
                        instead="launch --dry-run --no-check …")
    return options


def help_text() -> str:
    """Return the text of `launch --help`."""
    return "\n".join([
        f"usage: {typed_name('launch')} [options] [--] COMMAND ARGUMENTS…", "",
        wrap_paragraph("Start ranks of COMMAND on the nodes of this allocation (Slurm, PBS, …) or of a hostfile, "
                       "or on this machine. Options of launch come first; all words from COMMAND on belong to "
                       "COMMAND."), "",
        *option_lines(_OPTIONS), "",
        wrap_paragraph("Exit code: that of the first failing rank; 128 + signal number if a signal killed it; 124 "
                       "after a timeout; 3 if a rank cannot be started; 2 for a usage error."), "",
        examples(("launch -n 2 python3 -m ezpz_llm.train  two ranks, on this machine or in a job",
                  "launch --dry-run python3 train.py  what would run, and why",
                  "launch --nodes 2 --ppn 4 python3 train.py")),
    ])


_PACKAGE = "ezpz_llm"
_SCRIPT = "ezpz-llm"


class Target(NamedTuple):
    """Command to launch.

    Attributes:
        name: name of the run.
        module: module of a command of ezpz_llm, such as "ezpz_llm.train"; None for other programs.
        arguments: words after the script or module.
    """

    name: str
    module: str | None
    arguments: tuple[str, ...]


def read_command(words: tuple[str, ...]) -> Target:
    """Parse the command to launch; detect `python3 [flags] -m ezpz_llm.COMMAND …` and `ezpz-llm COMMAND …`.

    Raises:
        UserError: `words` is empty.
    """
    if not words:
        raise UserError("no command to launch", instead="launch [options] python3 train.py … (see launch --help)")
    program = os.path.basename(words[0])
    if program == _SCRIPT and len(words) > 1 and not words[1].startswith("-"):
        name = words[1].replace("-", "_")
        return Target(name, f"{_PACKAGE}.{name}", words[2:])
    return _python_target(words) if program.startswith("python") else Target(program, None, words[1:])


def _python_target(command: tuple[str, ...]) -> Target:
    position = 1
    while position < len(command) and command[position].startswith("-"):
        word = command[position]
        if word == "-m" and position + 1 < len(command):
            module = command[position + 1]
            name = module.removesuffix(".__main__").rsplit(".", 1)[-1]
            is_package_module = module.startswith(f"{_PACKAGE}.")
            return Target(name, module if is_package_module else None, command[position + 2:])
        if word == "-c":
            return Target("python", None, command[position + 1:])
        # -X and -W take a value, in the next word unless it is attached.
        position += 2 if word in ("-X", "-W") else 1
    if position >= len(command):
        return Target("python", None, ())
    return Target(Path(command[position]).stem, None, command[position + 1:])


def program_file(words: tuple[str, ...], target: Target) -> str:
    """Return the script, executable or module name that `words` runs; `target` is parsed from `words`."""
    return words[len(words) - len(target.arguments) - 1]


_INTERPRETERS = (
    # Programs, options after which standard input is not read, and options with a value in the next word.
    (re.compile(r"python[\d.]*"), re.compile(r"-[bBdEiIOPqRsSuvx]*[cmhV]|--(?:help|version)"), ("-X", "-W")),
    (re.compile(r"(?:ba|da|k|z)?sh"), re.compile(r"-[a-z]*c|--(?:help|version)"), ("-o", "-O")),
)


_STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_WRAPPERS = ("env", "nice", "ionice", "timeout", "time", "nohup", "setsid", "stdbuf", "numactl", "taskset",
             "apptainer", "singularity")
"""Programs that start the program in their arguments."""


def reads_program(words: tuple[str, ...]) -> bool:
    """Return True for an interpreter that reads its program from standard input, such as `env A=1 python3 -`."""
    if os.path.basename(words[0]) in _WRAPPERS:
        # Without "-", an interpreter's name may be an argument of another program.
        return words[-1] in _STDIN and any(_reads_program(words[start:]) for start in range(1, len(words)))
    return _reads_program(words)


def _reads_program(words: tuple[str, ...]) -> bool:
    name = os.path.basename(words[0])
    for names, others, valued in _INTERPRETERS:
        if not names.fullmatch(name):
            continue
        arguments = iter(words[1:])
        for word in arguments:
            if word in _STDIN or (word == "-s" and "-o" in valued):
                return True
            if not word.startswith("-") or others.match(word):
                return False
            if word in valued:
                next(arguments, None)
        return True
    return False


def run_dir_of(target: Target, given: Path | None) -> Path | None:
    """Return the run directory of launch's option (`given`) or the command's own option, or None.

    Raises:
        UserError: both are set, and differ.
    """
    value = value_of(target.arguments, "--run-dir") if target.module else None
    command_dir = Path(value) if value else None
    if command_dir is None or given is None:
        return given or command_dir
    if user_path(command_dir).absolute() != user_path(given).absolute():
        raise UserError(f"two run directories: {given} and {command_dir}",
                        where=f"launch --run-dir {given}, {target.module} --run-dir {command_dir}",
                        instead="set it once")
    return given
