"""Detection of a command that is a launcher itself, such as torchrun: each rank would start its own run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from ezpz_llm.core.base import whole_number
from ezpz_llm.core.rundir import redact_words
from ezpz_llm.launcher.jobs.option_parsing import value_of

_TORCH = re.compile(r"torchrun|deepspeed|accelerate|torch\.distributed\.(?:run|launch)|deepspeed\.launcher\.\w+"
                    r"|accelerate\.commands\.\w+")
"""Programs and modules that run a Python script, or a module after `-m`."""
_OTHER = re.compile(r"(?:mpi(?:exec|run)(?:[._-]\w+)*|orterun|prterun|srun|aprun|jsrun|ibrun|horovodrun|flux)")
_SUBCOMMANDS = {"accelerate": "launch", "accelerate.commands.accelerate_cli": "launch", "flux": "run"}
"""Programs and modules that start ranks with only one of their subcommands."""
_WRAPPERS = frozenset({"env", "exec", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time",
                       "timeout"})
_SHELLS = frozenset({"bash", "dash", "sh", "zsh"})
_SEPARATORS = frozenset(";&|()")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_PER_NODE_OPTIONS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--ntasks-per-node", "-ppn")
_WORLD_SIZE_OPTIONS = ("-n", "-np", "--np", "--ntasks", "--num_processes", "--num-processes")


def nested_launcher_notes(command: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return a note that suggests another command line if `command` starts ranks itself; else an empty tuple."""
    nested_command = _find_launcher(command)
    if not nested_command:
        return ()
    name = os.path.basename(nested_command[0])
    starts = f"each of the {ranks} ranks starts" if ranks > 1 else "the rank starts"
    return (f"NESTED LAUNCHER: {name} is a launcher itself, and {starts} a separate run of it. Type instead:"
            f" {_equivalent_launch(nested_command)}",)


def _find_launcher(command: Sequence[str]) -> Sequence[str]:
    """Return `command` from the launcher on, or an empty tuple."""
    if not command:
        return ()
    program = os.path.basename(command[0])
    if _starts_ranks(command):
        return command
    if program.startswith("python"):
        return _find_in_python(command)
    if program in _WRAPPERS:
        positions = [number for number, word in enumerate(command) if number and _is_known(os.path.basename(word))]
        return _find_launcher(command[positions[0]:]) if positions else ()
    if script := shell_script(command):
        return next(filter(None, map(_find_launcher, _simple_commands(script))), ())
    return ()


def shell_script(command: Sequence[str]) -> str:
    """Return SCRIPT of a command `bash [options] -c SCRIPT`, also of -lc and the like; "" for other commands."""
    if os.path.basename(command[0]) not in _SHELLS:
        return ""
    position = 1
    while position < len(command) and command[position].startswith(("-", "+")):
        word = command[position]
        if not word.startswith("--") and "c" in word:
            return next(iter(command[position + 1:]), "")
        position += 2 if word[1:].endswith(("o", "O")) else 1  # -o pipefail, -O extglob
    return ""


def _starts_ranks(command: Sequence[str]) -> bool:
    program = os.path.basename(command[0])
    subcommand = _SUBCOMMANDS.get(program)
    is_launcher = _TORCH.fullmatch(program) or _OTHER.fullmatch(program)
    return bool(is_launcher) and (subcommand is None or subcommand == next(iter(command[1:]), None))


def _is_known(program: str) -> bool:
    return (program.startswith("python") or program in _WRAPPERS | _SHELLS
            or bool(_TORCH.fullmatch(program) or _OTHER.fullmatch(program)))


def _find_in_python(command: Sequence[str]) -> Sequence[str]:
    """Find the launcher in `python3 [flags] -m MODULE …` and `python3 [flags] /bin/torchrun …`."""
    position = 1
    while position < len(command) and command[position].startswith("-"):
        if command[position] == "-c":
            return ()
        if command[position] == "-m":
            position += 1
            break
        # -X and -W take a value, in the next word unless it is attached.
        position += 2 if command[position] in ("-X", "-W") else 1
    arguments = command[position:]
    return arguments if arguments and _starts_ranks(arguments) else ()


def _simple_commands(script: str) -> Iterator[list[str]]:
    """Split the text of `bash -c` into commands, without leading variable assignments."""
    lexer = shlex.shlex(script.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    try:
        for word in lexer:
            if set(word) <= _SEPARATORS:
                yield command
                command = []
            elif command or not _ASSIGNMENT.fullmatch(word):
                command.append(word)
    except ValueError:
        return  # unbalanced quotes: the shell reports them
    yield command


def _equivalent_launch(command: Sequence[str]) -> str:
    """Return the launch command line that starts the same program."""
    program: tuple[str, ...] = ("PROGRAM",)
    options = command[1:]
    for number, word in enumerate(command[1:], start=1):
        if os.path.basename(word).startswith("python"):
            program = tuple(command[number:])
        elif word.endswith(".py"):
            program = ("python3", *command[number:])
        elif word in ("-m", "--module") and _TORCH.fullmatch(os.path.basename(command[0])):
            program = ("python3", "-m", *command[number + 1:])
        else:
            continue
        options = command[1:number]
        break
    count: tuple[str, ...] = ()
    for option, names in (("-n", _WORLD_SIZE_OPTIONS), ("--ppn", _PER_NODE_OPTIONS)):
        if whole_number(value := value_of(options, *names) or ""):
            count = (option, value)
    return shlex.join(redact_words(["launch", *count, *program]))
