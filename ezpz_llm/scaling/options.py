"""Command line of a study: its options, and the training command that every point runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import MOST_RANKS, MOST_REPEATS, UserError
from ezpz_llm.base.parser import examples, typed_name, wrapped
from ezpz_llm.launch.option_parsing import (
    Option,
    Options as LaunchOptions,
    command_line,
    number,
    one_of,
    option_lines,
    parse as parse_launch,
    read_command,
    split_options,
    value_of,
    whole,
    without,
)

EXAMPLE = "ezpz-llm scale --nodes 1,2,4 -- python3 -m ezpz_llm.train"
MODES = ("weak", "strong", "both")
SUBJECTS = ("scaling", "layouts")
_TRAINER = "ezpz_llm.train"
_STARTS = (("launch",), ("ezpz-llm", "launch"))


@dataclass(frozen=True)
class Options:
    """One call of `ezpz-llm scale`.

    `nodes` or `ranks` are the sizes of the points; `launch_words` the user's own options of launch, without
    --hosts, which `hosts` holds; `command` the training command; `submit` the options for `ezpz-llm submit`, None
    where the study runs here; `folder` the study's; `target` the efficiency that the report looks for; `only` the
    names of the points to run, empty for all.
    """

    nodes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    mode: str | None = None
    ds_configs: tuple[str, ...] = ()
    model: str | None = None
    what: str = "scaling"
    repeats: int = 3
    seed: int = 0
    launch_words: tuple[str, ...] = ()
    hosts: str | None = None
    command: tuple[str, ...] = ()
    folder: Path | None = None
    target: float = 0.8
    only: tuple[str, ...] = ()
    retry_failed: bool = False
    submit: tuple[str, ...] | None = None
    dry_run: bool = False
    check: bool = False
    world_size: int | None = None
    help: bool = False


def _list(convert: Callable[[str], object], what: str) -> Callable[[str], tuple]:
    def read(text: str) -> tuple:
        try:
            values = tuple(convert(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise ValueError(what) from error
        if len(set(values)) < len(values):
            raise ValueError(f"{what}, each once")
        return values

    return read


def _name(text: str) -> str:
    if not text:
        raise ValueError("a name")
    return text


_SIZES = _list(whole(1, MOST_RANKS), "a list of whole numbers such as 1,2,4")
_NAMES = _list(_name, "a list of names such as zero1,zero3")
_OPTIONS = (
    Option(("--nodes",), "nodes", "sizes of the points in nodes of this reservation: 1,2,4", "LIST", _SIZES),
    Option(("--ranks",), "ranks", "instead: sizes in ranks on one host: 1,2", "LIST", _SIZES),
    Option(("--mode",), "mode", "weak (fixed batch per device, the default), strong (fixed global batch), both",
           "M", one_of(MODES)),
    Option(("--ds-config",), "ds_configs", "layouts to compare: zero1,zero3 (default: the command's)", "LIST",
           _NAMES),
    Option(("--model",), "model", "the model, if not the command's", "NAME", _name),
    Option(("--what",), "what", "scaling (the default), or layouts: one size, many ds_configs", "WHAT",
           one_of(SUBJECTS)),
    Option(("--repeats",), "repeats", "runs of each point (3)", "K", whole(1, MOST_REPEATS)),
    Option(("--seed",), "seed", "fixes the random order of the runs (0)", "N", whole(0, 2**32 - 1)),
    Option(("--study",), "folder", "the study's folder (default: runs/scale-<stamp>); an old one is continued",
           "D", Path),
    Option(("--target",), "target", "say up to which size efficiency stays at or above this (0.8)", "E",
           number(1, "a fraction such as 0.8")),
    Option(("--point",), "only", "run these points of the study only", "LIST", _NAMES),
    Option(("--retry-failed",), "retry_failed", "run those again that have failed"),
    Option(("--submit",), "submit", 'queue one job a point, with these options of submit: "--time 1:00:00"',
           "WORDS", command_line),
    Option(("--dry-run",), "dry_run", "check and print the points, with estimated time and node-hours; start and"
           " write nothing"),
    Option(("--check",), "check", "find what is wrong and stop"),
    Option(("--world-size",), "world_size", "ranks to check for", "N", whole(1, MOST_RANKS)),
    Option(("-h", "--help"), "help", "print this and end"),
)


def parse(words: Sequence[str]) -> Options:
    """Read the study's options and the command after them. No command is needed where the study is there already.

    Raises:
        UserError: an unknown option, an unusable or missing value, a command that is no training run.
    """
    found, rest = split_options(words, _OPTIONS, EXAMPLE + " {option}")
    if found.get("help"):
        return Options(help=True)
    if not rest:
        return _going_on(found)
    if bool(found.get("nodes")) == bool(found.get("ranks")):
        raise UserError("a study needs its sizes" if "nodes" not in found else "sizes both in nodes and in ranks",
                        where="--nodes, --ranks", instead="--nodes 1,2,4, or --ranks 1,2 on one host (what came of "
                        "a study: ezpz-llm scale report D, ezpz-llm scale compare A B)")
    _check_layouts(found)
    launch, launch_words = _split_launch(tuple(rest))
    command = launch.command
    if is_own_script(command):
        _check_own_script(found)
    if found.get("ds_configs") and value_of(command, "--ds-config") is not None:
        raise UserError("layouts are named twice", where="scale --ds-config, and that of the command",
                        instead="name them once: scale --ds-config")
    if found.get("model"):
        command = (*without(command, "--model"), "--model", found["model"])
    return Options(**{**found, "command": command}, launch_words=without(launch_words, "--hosts"),
                   hosts=launch.hosts)


def _going_on(found: dict[str, Any]) -> Options:
    """The options for a study that is there already: what it is stands in its folder."""
    if "folder" not in found:
        raise UserError("no command to study", instead=EXAMPLE)
    asked = found.keys() & {"nodes", "ranks", "mode", "ds_configs", "model", "what", "repeats", "seed"}
    if asked:
        raise UserError("what a study is cannot change once it has begun", where=f"--study {found['folder']}",
                        instead="leave the other options out, or give the command for a new study")
    return Options(**found)


def _check_layouts(found: dict[str, Any]) -> None:
    if found.get("what") != "layouts":
        return
    if len(found.get("nodes") or found.get("ranks") or ()) > 1:
        raise UserError("layouts are compared at one size", where="--what layouts",
                        instead="--nodes 2, or --ranks 2")
    if found.get("mode", "strong") != "strong":
        raise UserError(f"layouts are compared at the same global batch, which mode {found['mode']} does not keep",
                        where="--what layouts", instead="leave --mode out")


def is_own_script(command: Sequence[str]) -> bool:
    """True if it is no command of this package: a script that records its steps by `ezpz_llm.record`."""
    return read_command(tuple(command)).module is None


def _check_own_script(found: dict[str, Any]) -> None:
    for name, option in (("ds_configs", "--ds-config"), ("model", "--model")):
        if found.get(name):
            raise UserError(f"{option} in a study of a script of your own, which has its own", where=option,
                            instead="leave it out")
    if found.get("what") == "layouts":
        raise UserError("a script of your own has one layout", where="--what layouts",
                        instead="leave it out; ezpz-llm scale compare A B compares two studies")
    if found.get("mode", "weak") != "weak":
        raise UserError("a script of your own says itself what a rank takes, which is to be the same at every size",
                        where=f"--mode {found['mode']}", instead="leave it out")


def _split_launch(words: tuple[str, ...]) -> tuple[LaunchOptions, tuple[str, ...]]:
    """Parse the command as launch will, and the user's own words for launch."""
    starts = [start for start in _STARTS if (os.path.basename(words[0]), *words[1:len(start)]) == start]
    arguments = words[len(starts[0]):] if starts else words
    launch = parse_launch(arguments) if starts else LaunchOptions(command=words)
    mine = {"-n": launch.ranks, "--nodes": launch.nodes, "--run-dir": launch.run_dir, "--dry-run": launch.dry_run,
            "--help": launch.help}
    for option, value in mine.items():
        if value:
            raise UserError(f"launch {option} in a study, which decides that itself", where="the command after --",
                            instead="leave it out; --nodes or --ranks of scale give the sizes")
    target = read_command(launch.command)
    if target.module not in (_TRAINER, None):
        raise UserError(f"a study runs {_TRAINER} or a script of your own, and not {' '.join(launch.command[:3])}",
                        instead=EXAMPLE)
    for option, why in (("--run-dir", "each run gets its own"), ("--resume", "each run begins at its first step")):
        if value_of(target.arguments, option) is not None:
            raise UserError(f"{option} in a study: {why}", where="the command after --", instead="leave it out")
    mine_words = arguments[:len(arguments) - len(launch.command)]
    return launch, mine_words[:-1] if mine_words[-1:] == ("--",) else mine_words


def help_text() -> str:
    """The page that `scale --help` prints."""
    name = typed_name("scale")
    return "\n".join([
        f"usage: {name} --nodes LIST [options] -- [launch [its options]] python3 -m ezpz_llm.train …",
        f"       {name} --nodes LIST [options] -- [launch [its options]] python3 mine.py …",
        f"       {name} --study D                    continue a study",
        f"       {name} report D | paper D | compare A B    each has --help", "",
        wrapped("Run the command on every size, several times in a random order, and say how it scales."), "",
        *option_lines(_OPTIONS), "",
        wrapped("Exit code: 0 where every run has ended well; 1 where one failed or is still to be run; 2 where a "
                "point cannot run as it was asked for: nothing is started then."), "",
        examples(("ezpz-llm scale --nodes 1,2,4 -- python3 -m ezpz_llm.train --ds-config zero1",
                  "ezpz-llm scale --ranks 1,2 --mode strong -- python3 -m ezpz_llm.train  on one machine",
                  "ezpz-llm scale report runs/scale-20261122-011944")),
    ])
