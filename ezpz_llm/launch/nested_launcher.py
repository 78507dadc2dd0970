"""Detection of a launcher, such as torchrun, as the command to launch: each rank would start a separate run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from ezpz_llm.base import whole_number
from ezpz_llm.launch.option_parsing import value_of
from ezpz_llm.rundir import redact_words

_TORCH = re.compile(r"torchrun|deepspeed|accelerate|torch\.distributed\.(?:run|launch)|deepspeed\.launcher\.\w+"
                    r"|accelerate\.commands\.\w+")
"""Programs and modules that run a Python script, or a module after `-m`."""
_OTHER = re.compile(r"(?:mpi(?:exec|run)(?:[._-]\w+)*|orterun|prterun|srun|aprun|jsrun|ibrun|horovodrun|flux)")
_BY_COMMAND = {"accelerate": "launch", "accelerate.commands.accelerate_cli": "launch", "flux": "run"}
"""Programs and modules that start ranks with only one of their subcommands."""
_WRAPPERS = frozenset({"env", "exec", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time",
                       "timeout"})
_SHELLS = frozenset({"bash", "dash", "sh", "zsh"})
_SEPARATORS = frozenset(";&|()")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--ntasks-per-node", "-ppn")
_IN_ALL = ("-n", "-np", "--np", "--ntasks", "--num_processes", "--num-processes")


def nested_launcher_notes(command: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return a note with what to type instead, if `command` starts ranks itself."""
    words = _find_launcher(command)
    if not words:
        return ()
    name = os.path.basename(words[0])
    starts = f"each of the {ranks} ranks starts" if ranks > 1 else "the rank starts"
    return (f"NESTED LAUNCHER: {name} is a launcher itself, and {starts} a separate run of it. Type instead:"
            f" {_instead(words)}",)


def _find_launcher(words: Sequence[str]) -> Sequence[str]:
    """Return `words` from the launcher on, or an empty tuple."""
    if not words:
        return ()
    program = os.path.basename(words[0])
    if _starts_ranks(words):
        return words
    if program.startswith("python"):
        return _find_in_python(words)
    if program in _WRAPPERS:
        rest = [number for number, word in enumerate(words) if number and _is_known(os.path.basename(word))]
        return _find_launcher(words[rest[0]:]) if rest else ()
    if program in _SHELLS and (script := value_of(words, "-c", "-lc", "-ec")):
        return next(filter(None, map(_find_launcher, _simple_commands(script))), ())
    return ()


def _starts_ranks(words: Sequence[str]) -> bool:
    program = os.path.basename(words[0])
    wanted = _BY_COMMAND.get(program)
    is_launcher = _TORCH.fullmatch(program) or _OTHER.fullmatch(program)
    return bool(is_launcher) and (wanted is None or wanted == next(iter(words[1:]), None))


def _is_known(program: str) -> bool:
    return (program.startswith("python") or program in _WRAPPERS | _SHELLS
            or bool(_TORCH.fullmatch(program) or _OTHER.fullmatch(program)))


def _find_in_python(words: Sequence[str]) -> Sequence[str]:
    """Find the launcher in `python3 [flags] -m MODULE …` and `python3 [flags] /bin/torchrun …`."""
    position = 1
    while position < len(words) and words[position].startswith("-"):
        if words[position] == "-c":
            return ()
        if words[position] == "-m":
            position += 1
            break
        # -X and -W take a value, in the next word unless it is attached.
        position += 2 if words[position] in ("-X", "-W") else 1
    rest = words[position:]
    return rest if rest and _starts_ranks(rest) else ()


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


def _instead(words: Sequence[str]) -> str:
    """Return the launch command line that starts the same program."""
    program: tuple[str, ...] = ("PROGRAM",)
    options = words[1:]
    for number, word in enumerate(words[1:], start=1):
        if os.path.basename(word).startswith("python"):
            program = tuple(words[number:])
        elif word.endswith(".py"):
            program = ("python3", *words[number:])
        elif word in ("-m", "--module") and _TORCH.fullmatch(os.path.basename(words[0])):
            program = ("python3", "-m", *words[number + 1:])
        else:
            continue
        options = words[1:number]
        break
    count: tuple[str, ...] = ()
    for option, names in (("-n", _IN_ALL), ("--ppn", _PER_NODE)):
        if whole_number(value := value_of(options, *names) or ""):
            count = (option, value)
    return shlex.join(redact_words(["launch", *count, *program]))
