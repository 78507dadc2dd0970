"""Cases to certify: a layout with a model, a precision and a world size each; and the options that choose them
(imports no torch).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError, unknown
from ezpz_llm.certify import recipe
from ezpz_llm.certify.injected_faults import FAULTS, find_fault
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.layout import ds_config
from ezpz_llm.layout.layout import Layout, read_layout
from ezpz_llm.layout.resolve import Request, Resolved, resolve
from ezpz_llm.model.config import MODELS

_DP_SIZES = (1, 2, 4)
_MOST_RANKS = 4
_WORLDS = {"3d": (8,)}
"""World sizes that the degrees of a ds_config do not say: the third dimension of 3d is data-parallel."""


@dataclass(frozen=True)
class Case:
    """One layout with one model in one precision on one number of ranks, perhaps with an injected fault."""

    layout: str
    world: int
    model: str
    dtype: str
    fault: str | None = None

    @property
    def title(self) -> str:
        """In words, for a line of output."""
        fault = f" with {self.fault}" if self.fault else ""
        return f"{self.layout} {self.model} {self.dtype} on {self.world} rank{'s' * (self.world > 1)}{fault}"


@dataclass(frozen=True)
class Skipped:
    """A case that cannot run, and why; `illegal` where no machine could run it, else there is something to type."""

    case: Case
    reason: str
    illegal: bool


def layout_of(name: str) -> Layout:
    """The layout of a ds_config, by name or path."""
    return read_layout(ds_config.load(name))


def natural_worlds(name: str) -> tuple[int, ...]:
    """The worlds of up to four ranks in which a layout has one, two or four data-parallel ranks; 3d's is eight."""
    layout = layout_of(name)
    others = layout.tp * layout.pp * layout.sp
    return _WORLDS.get(layout.name) or tuple(others * size for size in _DP_SIZES if others * size <= _MOST_RANKS)


def resolve_case(case: Case, device: str | None) -> Resolved:
    """The case's layout with the recipe's numbers.

    Raises:
        UserError: it cannot run.
    """
    pipeline = layout_of(case.layout).pp > 1
    resolved = resolve(Request(case.layout, world_size=case.world, global_batch=recipe.GLOBAL_BATCH,
                               clip=recipe.CLIP,
                               accumulation=recipe.PIPELINE_ACCUMULATION if pipeline else recipe.ACCUMULATION,
                               precision=case.dtype, device=device, model=recipe.model_config(case.model)))
    if resolved.deepspeed is None:
        return resolved
    zero = resolved.deepspeed["zero_optimization"]
    scaled = {key: min(zero.get(key, most), most) for key, most in recipe.SCALED.items()
              if resolved.layout.zero.stage == 3 or (key.endswith("bucket_size") and not key.startswith("stage3"))}
    deepspeed = {**resolved.deepspeed, "zero_optimization": {**zero, **scaled}}
    if "aio" in deepspeed:
        deepspeed["aio"] = {**deepspeed["aio"], "block_size": recipe.SMALLEST_FILE}
    return replace(resolved, deepspeed=deepspeed)


def all_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
              dtypes: Sequence[str]) -> list[Case]:
    """Every combination, by world; each layout in its natural worlds where none are asked for."""
    cases = [Case(layout, world, model, dtype) for layout in layouts
             for world in worlds or natural_worlds(layout) for model in models for dtype in dtypes]
    return sorted(cases, key=lambda case: case.world)


def quick_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
                dtypes: Sequence[str]) -> list[Case]:
    """Each layout once in the first precision, in its smallest world of several ranks (of those asked for, if any),
    the models in turn; and two in the other precisions."""
    cases = []
    for number, layout in enumerate(layouts):
        sizes = [size for size in natural_worlds(layout) if worlds is None or size in worlds] or list(worlds or ())
        world = next((size for size in sizes if size > 1), sizes[0])
        cases.append(Case(layout, world, models[number % len(models)], dtypes[0]))
    cases += [replace(case, model=models[-1], dtype=dtype) for case in cases if case.layout in ("zero3", "tp2")
              for dtype in dtypes[1:]]
    return sorted(cases, key=lambda case: case.world)


def divide(cases: Sequence[Case], device: str | None) -> tuple[list[Case], list[Skipped]]:
    """Those that can run here, and those that cannot."""
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in cases:
        try:
            resolve_case(case, device)
        except UserError as error:
            # An op that is not built is a state of this machine, and has a command that mends it.
            illegal = not (error.instead or "").startswith("ezpz-llm doctor")
            mend = "" if illegal or not error.instead else f" (type: {error.instead})"
            skipped.append(Skipped(case, error.found + mend, illegal))
        else:
            legal.append(case)
    return legal, skipped


# The command line, validated.
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
    _check_known(models, tuple(MODELS), "model", "--model")
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
