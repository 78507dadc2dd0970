"""What the user's command is: one of our own commands, or any program."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.package_data import user_path

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
    if program.startswith("python"):
        return _python_target(words)
    return Target(program, None, words[1:])


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
    own = _own_run_dir(target) if target.module else None
    if own is None or given is None:
        return given or own
    if user_path(own).absolute() != user_path(given).absolute():
        raise UserError(f"two run directories: {given} and {own}",
                        where=f"launch --run-dir {given}, {target.module} --run-dir {own}",
                        instead="name it once")
    return given


def _own_run_dir(target: Target) -> Path | None:
    found = None
    for position, word in enumerate(target.arguments):
        if word == "--run-dir" and position + 1 < len(target.arguments):
            found = target.arguments[position + 1]
        elif word.startswith("--run-dir="):
            found = word.partition("=")[2]
    return Path(found) if found else None
