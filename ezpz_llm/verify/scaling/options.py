"""Command line of `ezpz-llm scale`: options of a study, and the training command that each point runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import MAX_RANKS, MAX_REPEATS, UserError
from ezpz_llm.core.base.help_pages import examples, typed_name, wrap_paragraph
from ezpz_llm.launcher.jobs.option_parsing import (
    Option,
    Options as LaunchOptions,
    command_line,
    one_of,
    option_lines,
    parse as parse_launch,
    read_command,
    remove_options,
    split_options,
    value_of,
    whole,
)

_EXAMPLE = "ezpz-llm scale --nodes 1,2,4 -- python3 -m ezpz_llm.train"
_MODES = ("weak", "strong", "both")
_SUBJECTS = ("scaling", "layouts")
_TRAINER = "ezpz_llm.train"
_LAUNCH_WORDS = (("launch",), ("ezpz-llm", "launch"))


@dataclass(frozen=True)
class Options:
    """Options of `ezpz-llm scale`.

    Attributes:
        nodes, ranks: sizes of the points, in one of the two units.
        launch_words: the user's options for launch, except --hosts, which `hosts` contains.
        command: training command.
        submit: options for `ezpz-llm submit`; None to run the study here.
        folder: folder of the study.
        only: names of the points to run; empty for all.
    """

    nodes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    mode: str | None = None
    ds_configs: tuple[str, ...] = ()
    what: str = "scaling"
    repeats: int = 3
    seed: int = 0
    launch_words: tuple[str, ...] = ()
    hosts: str | None = None
    command: tuple[str, ...] = ()
    folder: Path | None = None
    only: tuple[str, ...] = ()
    retry_failed: bool = False
    submit: tuple[str, ...] | None = None
    dry_run: bool = False
    check: bool = False
    world_size: int | None = None
    help: bool = False


def _list_of(convert: Callable[[str], object], description: str) -> Callable[[str], tuple]:
    def convert_list(text: str) -> tuple:
        """Convert words separated by commas, or raise ValueError with the description."""
        try:
            values = tuple(convert(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise ValueError(description) from error
        if len(set(values)) < len(values):
            raise ValueError(f"{description}, each once")
        return values

    return convert_list


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError("a name")
    return text


_SIZES = _list_of(whole(1, MAX_RANKS), "a list of whole numbers such as 1,2,4")
_NAMES = _list_of(_nonempty, "a list of names such as zero1,zero3")
_OPTIONS = (
    Option(("--nodes",), "nodes", "sizes of the points in nodes of this allocation: 1,2,4", "LIST", _SIZES),
    Option(("--ranks",), "ranks", "sizes of the points in ranks on one node, in place of --nodes: 1,2", "LIST",
           _SIZES),
    Option(("--mode",), "mode", "weak (fixed batch per device, the default), strong (fixed global batch), both",
           "M", one_of(_MODES)),
    Option(("--ds-config",), "ds_configs", "layouts to compare: zero1,zero3 (default: the command's)", "LIST",
           _NAMES),
    Option(("--what",), "what", "scaling (the default), or layouts: one size, many ds_configs", "WHAT",
           one_of(_SUBJECTS)),
    Option(("--repeats",), "repeats", "runs of each point (3)", "K", whole(1, MAX_REPEATS)),
    Option(("--seed",), "seed", "seed of the random order of the runs (0)", "N", whole(0, 2**32 - 1)),
    Option(("--study",), "folder", "folder of the study (default: runs/scale-<stamp>); continue an existing study",
           "D", Path),
    Option(("--point",), "only", "run only these points of the study", "LIST", _NAMES),
    Option(("--retry-failed",), "retry_failed", "run failed runs again"),
    Option(("--submit",), "submit", 'queue one job per point, with these options for submit: "--time 1:00:00"',
           "WORDS", command_line),
    Option(("--dry-run",), "dry_run", "check and print the points, with estimated time and node-hours; start and"
           " write nothing"),
    Option(("--check",), "check", "validate the options and the points, and exit"),
    Option(("--world-size",), "world_size", "number of ranks, for --check", "N", whole(1, MAX_RANKS)),
    Option(("-h", "--help"), "help", "print this help and exit"),
)


def parse(words: Sequence[str]) -> Options:
    """Parse the options of a study and the command after them. An existing study does not need a command.

    Raises:
        UserError: an option is unknown, a value is missing or invalid, or a study cannot run the command.
    """
    values, command_words = split_options(words, _OPTIONS, _EXAMPLE + " {option}")
    if values.get("help"):
        return Options(help=True)
    if not command_words:
        return _options_to_continue(values)
    if bool(values.get("nodes")) == bool(values.get("ranks")):
        raise UserError("a study requires sizes" if "nodes" not in values else "sizes both in nodes and in ranks",
                        where="--nodes, --ranks", instead="--nodes 1,2,4, or --ranks 1,2 on one node (for the "
                        "results of a study: ezpz-llm scale report D, ezpz-llm scale compare A B)")
    _check_layouts(values)
    launch, launch_words = _split_launch(tuple(command_words))
    command = launch.command
    if is_own_script(command):
        _check_own_script(values)
    if values.get("ds_configs") and value_of(command, "--ds-config") is not None:
        raise UserError("layouts are set twice", where="--ds-config of scale and of the command",
                        instead="only scale --ds-config")
    return Options(**{**values, "command": command}, launch_words=remove_options(launch_words, "--hosts"),
                   hosts=launch.hosts)


def _options_to_continue(values: dict[str, Any]) -> Options:
    """Return the options for an existing study, whose definition is stored in its folder."""
    if "folder" not in values:
        raise UserError("no training command", instead=_EXAMPLE)
    fixed = values.keys() & {"nodes", "ranks", "mode", "ds_configs", "what", "repeats", "seed"}
    if fixed:
        raise UserError("the definition of a study cannot change after its start",
                        where=f"--study {values['folder']}",
                        instead="leave the other options out, or pass the command for a new study")
    return Options(**values)


def _check_layouts(values: dict[str, Any]) -> None:
    if values.get("what") != "layouts":
        return
    if len(values.get("nodes") or values.get("ranks") or ()) > 1:
        raise UserError("layouts are compared at one size", where="--what layouts",
                        instead="--nodes 2, or --ranks 2")
    if values.get("mode", "strong") != "strong":
        raise UserError("layouts are compared at the same global batch, which mode "
                        f"{values['mode']} does not keep", where="--what layouts", instead="leave --mode out")


def is_own_script(command: Sequence[str]) -> bool:
    """Return True for a user's script, which records its steps with `ezpz_llm.record`."""
    return read_command(tuple(command)).module is None


def _check_own_script(values: dict[str, Any]) -> None:
    if values.get("ds_configs"):
        raise UserError("--ds-config does not apply to your own script", where="--ds-config",
                        instead="leave it out")
    if values.get("what") == "layouts":
        raise UserError("your own script has one layout", where="--what layouts",
                        instead="leave it out; ezpz-llm scale compare A B compares two studies")
    if values.get("mode", "weak") != "weak":
        raise UserError("your own script supports only weak scaling: it chooses the batch of a rank itself",
                        where=f"--mode {values['mode']}", instead="leave it out")


def _split_launch(words: tuple[str, ...]) -> tuple[LaunchOptions, tuple[str, ...]]:
    """Parse the command as launch does; return launch's options, parsed and as the user typed them."""
    prefixes = [start for start in _LAUNCH_WORDS if (os.path.basename(words[0]), *words[1:len(start)]) == start]
    arguments = words[len(prefixes[0]):] if prefixes else words
    launch = parse_launch(arguments) if prefixes else LaunchOptions(command=words)
    reserved = {"-n": launch.ranks, "--nodes": launch.nodes, "--run-dir": launch.run_dir,
                "--dry-run": launch.dry_run, "--help": launch.help}
    for option, value in reserved.items():
        if value:
            raise UserError(f"launch {option} is not supported in a study", where="the command after --",
                            instead="leave it out; --nodes or --ranks of scale set the sizes")
    target = read_command(launch.command)
    if target.module not in (_TRAINER, None):
        raise UserError(f"a study runs {_TRAINER} or your own script, not {' '.join(launch.command[:3])}",
                        instead=_EXAMPLE)
    for option, reason in (("--run-dir", "each run gets its own"), ("--resume", "each run starts at step 1")):
        if value_of(target.arguments, option) is not None:
            raise UserError(f"{option} is not supported in a study: {reason}", where="the command after --",
                            instead="leave it out")
    launch_words = arguments[:len(arguments) - len(launch.command)]
    return launch, launch_words[:-1] if launch_words[-1:] == ("--",) else launch_words


def help_text() -> str:
    """Return the text of `scale --help`."""
    name = typed_name("scale")
    return "\n".join([
        f"usage: {name} --nodes LIST [options] -- [launch [its options]] python3 -m ezpz_llm.train …",
        f"       {name} --nodes LIST [options] -- [launch [its options]] python3 mine.py …",
        f"       {name} --study D                    continue a study",
        f"       {name} report D | paper D | compare A B    each has --help", "",
        wrap_paragraph("Run the command at each size, several times in random order, and report its scaling "
                       "efficiency."),
        "", *option_lines(_OPTIONS), "",
        wrap_paragraph("Exit codes: 0 if all runs succeeded; 1 if a run failed or is left to run; 2 if a point "
                       "cannot run as requested, in which case nothing is started."), "",
        examples(("ezpz-llm scale --nodes 1,2,4 -- python3 -m ezpz_llm.train --ds-config zero1",
                  "ezpz-llm scale --ranks 1,2 --mode strong -- python3 -m ezpz_llm.train  on one machine",
                  "ezpz-llm scale report runs/scale-20261122-011944")),
    ])
