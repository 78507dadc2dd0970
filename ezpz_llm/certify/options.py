"""Command line of certify, validated (imports no torch)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError, unknown
from ezpz_llm.certify import recipe
from ezpz_llm.certify.cases import Case, Skipped, all_cases, divide, layout_of, natural_worlds, quick_cases
from ezpz_llm.certify.injected_faults import FAULTS, find_fault
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.layout import ds_config
from ezpz_llm.model.config import MODELS

_DESCRIPTION = """Is every parallel layout the same maths as one process?

Each starts from one checkpoint and takes the same steps on the same tokens. Compared are the loss and the gradient
norm of each step, every parameter's first gradient, and the weights after the last step. Started alone, certify
runs the reference and then every world that is needed, one launch each; under launch it does what fits its ranks.
Exit code 0 only if all pass.
"""


@dataclass(frozen=True)
class Work:
    """The cases to run, those skipped with the reason, and how to run them."""

    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]
    steps: int
    device: str


class _OldName(argparse.Action):
    """The name that an option had in the last release: works, and says the new one on stderr."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        print(f"note: {option_string} is now --{self.dest.replace('_', '-')}; the old name goes with the next "
              "release", file=sys.stderr)
        setattr(namespace, self.dest, values)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="ezpz-llm certify", allow_abbrev=False, description=_DESCRIPTION,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layouts", default="all", metavar="all|NAME,…",
                      help="names in ds_configs/, or paths (%(default)s)")
    made.add_argument("--world", metavar="N,…",
                      help="numbers of ranks (each layout's natural ones, up to 4; 8 for 3d)")
    made.add_argument("--model", default=",".join(recipe.MODELS), metavar="NAME,…",
                      help="shapes (%(default)s; these two in a still smaller size)")
    made.add_argument("--dtype", default=",".join(recipe.DTYPES), metavar="NAME,…", help="(%(default)s)")
    made.add_argument("--steps", type=int, default=recipe.STEPS, metavar="K", help="optimizer steps (%(default)s)")
    made.add_argument("--quick", action="store_true",
                      help="each layout once, in the first --dtype and its smallest world of several ranks, and "
                           "zero3 and tp2 in the others")
    made.add_argument("--inject-fault", metavar="NAME,…",
                      help=f"inject faults, one after the other; it must then fail: {', '.join(FAULTS)}")
    made.add_argument("--plant", dest="inject_fault", action=_OldName, help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all numbers with versions and seeds")
    made.add_argument("--write-docs", action="store_true", help="write the table of docs/layouts.md from this run")
    made.add_argument("--device", default="auto", choices=("auto", *DEVICES),
                      help="where to compute (%(default)s)")
    made.add_argument("--run-dir", type=Path, metavar="D", help="where to write (launch's, or a new one in runs/)")
    made.add_argument("--check", action="store_true", help="only find what is wrong with the options (no torch)")
    made.add_argument("--world-size", type=int, metavar="N", help="the number of ranks, for --check under launch")
    return made


def plan(options: argparse.Namespace, world_size: int | None = None) -> Work:
    """Return the cases that the options ask for.

    Args:
        world_size: the number of ranks where they are given: only what runs on exactly so many is kept.

    Raises:
        UserError: an unknown name, a number that makes no sense, a fault that cannot be injected, nothing to do.
    """
    if options.steps < 3:
        raise UserError(f"{options.steps} steps are too few to see a steady one", where="--steps",
                        instead="3 or more")
    _check_outputs(options)
    layouts = ds_config.names() if options.layouts == "all" else _words(options.layouts, "--layouts")
    models, dtypes = _words(options.model, "--model"), _words(options.dtype, "--dtype")
    for name in layouts:
        try:
            layout_of(name)
        except UserError as error:
            raise UserError(error.found, where="--layouts", instead=error.instead) from None
    _check_known(models, MODELS, "model", "--model")
    _check_known(dtypes, recipe.DTYPES, "precision", "--dtype")
    worlds = _worlds(options.world)
    if world_size is not None:
        if worlds and world_size not in worlds:
            raise UserError(f"started on {world_size} ranks, but asked for {options.world}", where="--world",
                            instead="no --world under launch, or certify alone, which starts ranks itself")
        worlds = (world_size,)
    device = "cpu" if options.device == "auto" else options.device
    cases, skipped = divide((quick_cases if options.quick else all_cases)(layouts, worlds, models, dtypes), device)
    if not cases and not any(not one.illegal for one in skipped):
        reasons = "; ".join(dict.fromkeys(f"{one.case.layout}: {one.reason}" for one in skipped))
        natural = sorted({world for name in layouts for world in natural_worlds(name)})
        raise UserError(f"there is nothing to certify ({reasons})", where="--layouts, --world",
                        instead=f"--world {' or '.join(map(str, natural))}")
    if options.inject_fault:
        cases = _with_faults(_words(options.inject_fault, "--inject-fault"), cases)
    return Work(tuple(cases), tuple(skipped), options.steps, options.device)


def _check_outputs(options: argparse.Namespace) -> None:
    if options.write_docs and (options.layouts != "all" or options.quick or options.inject_fault or options.world):
        raise UserError("the page has a row for every layout, from a whole matrix", where="--write-docs",
                        instead="no --layouts, --world, --quick or --inject-fault")
    if options.json is not None and options.json.is_dir():
        raise UserError(f"{options.json} is a folder", where="--json", instead=f"{options.json / 'certify.json'}")


def _with_faults(names: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """Each case with each of the faults that it can have; every fault in one case at least."""
    found = []
    for name in names:
        reasons = {case: find_fault(name).needs(layout_of(case.layout), case.world) for case in cases}
        found += [replace(case, fault=name) for case, reason in reasons.items() if reason is None]
        if None not in reasons.values():
            why = "; ".join(dict.fromkeys(f"{case.layout} on {case.world} rank{'s' * (case.world > 1)}: {reason}"
                                          for case, reason in reasons.items()))
            raise UserError(f"{name} cannot be injected into {why}", where="--inject-fault",
                            instead="other --layouts, or --world 2")
    return sorted(found, key=lambda case: case.world)


def _words(text: str, where: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError("an empty list", where=where, instead="one or more names with commas between")
    return words


def _worlds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = _words(text, "--world")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{text!r} is not a list of world sizes", where="--world", instead="--world 2,4")
    return tuple(int(word) for word in words)


def _check_known(words: Sequence[str], known: Sequence[str], kind: str, where: str) -> None:
    for word in words:
        if word not in known:
            raise unknown(kind, word, known, where=where)
