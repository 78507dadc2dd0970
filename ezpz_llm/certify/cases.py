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

from ezpz_llm.base import UserError, unknown
from ezpz_llm.base.parser import CommandParser
from ezpz_llm.certify import recipe
from ezpz_llm.certify.injected_faults import FAULTS, find_fault
from ezpz_llm.certify.target_file import ACCUMULATION, DTYPES, LAYOUTS, TargetFile, find_target
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.layout import ds_config
from ezpz_llm.layout.layout import Layout, read_layout
from ezpz_llm.layout.precision_recipes import RECIPES
from ezpz_llm.layout.resolve import Request, Resolved, resolve
from ezpz_llm.model.config import MODELS

_DP_SIZES = (1, 2, 4)
_MOST_RANKS = 4
_WORLDS = {"3d": (8,), "zero3_hpz2": (4,), "fsdp2_within2": (4,)}
"""World sizes that the degrees of a ds_config do not say: the third dimension of 3d is data-parallel, and on two
ranks groups of two are all of them."""

_ROUNDED = ("ddp", "fsdp2", "zero1", "zero3", "zero3_offload_optimizer", "tiled", "tp2_zero1", "tp2_zero3", "sp2",
            "pp2", "pp2_tp2")
"""One layout of each kind: what --quick certifies in bf16 too."""

_NEVER_ON = "dropout, recomputation, fp16, the data reader, targets that are ignored, 3 ranks"
"""Paths that no layout has switched on, with --quick or without."""


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
    zero = scaled_down(resolved.deepspeed["zero_optimization"], resolved.layout.zero.stage)
    deepspeed = {**resolved.deepspeed, "zero_optimization": zero}
    if "aio" in deepspeed:
        deepspeed["aio"] = {**deepspeed["aio"], "block_size": recipe.SMALLEST_FILE}
    return replace(resolved, deepspeed=deepspeed)


def scaled_down(zero: dict[str, Any], stage: int | None,
                parameters: int = recipe.SCALED_FOR) -> dict[str, Any]:
    """A block "zero_optimization" with buckets and thresholds for a small model of so many parameters."""
    # DeepSpeed wants buckets that are a multiple of 2 (nccl_start_alignment_factor).
    most = {key: max(2, value * parameters // recipe.SCALED_FOR // 2 * 2) for key, value in recipe.SCALED.items()}
    return {**zero, **{key: min(zero.get(key, value), value) for key, value in most.items()
                       if stage == 3 or (key.endswith("bucket_size") and not key.startswith("stage3"))}}


def all_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
              dtypes: Sequence[str]) -> list[Case]:
    """Every combination, by world; each layout in its natural worlds where none are asked for."""
    cases = [Case(layout, world, model, dtype) for layout in layouts
             for world in worlds or natural_worlds(layout) for model in models for dtype in dtypes]
    return sorted(cases, key=lambda case: case.world)


def quick_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
                dtypes: Sequence[str]) -> list[Case]:
    """Each layout in its smallest world of several ranks (of those asked for, if any), the first precision and each
    model; and one of each kind in the last precision that it has, with the first model.

    That is `tiny-gpt2`: rounding moves its gradients in bf16 by a sixth of what it does to `tiny-llama`'s.
    """
    cases = []
    for layout in layouts:
        sizes = [size for size in natural_worlds(layout) if worlds is None or size in worlds] or list(worlds or ())
        world = next((size for size in sizes if size > 1), sizes[0])
        cases += [Case(layout, world, model, dtypes[0]) for model in models]
        if layout in _ROUNDED:
            rounded = [Case(layout, world, models[0], dtype) for dtype in reversed(dtypes[1:])]
            # One whose op is not built is no other's place: it is missing.
            illegal = {one.case for one in divide(rounded, None)[1] if one.illegal}
            cases += [case for case in rounded if case not in illegal][:1]
    return sorted(cases, key=lambda case: case.world)


def left_out(work: Work) -> str:
    """What of the whole matrix --quick does not have, and what no cell has, as lines to print."""
    layouts = list(dict.fromkeys(case.layout for case in work.cases))
    whole, _ = divide(all_cases(layouts, None, recipe.MODELS, recipe.DTYPES), None)
    rest = [case for case in whole if case not in work.cases]
    never = (f"no layout has switched on: {_NEVER_ON}\n"
             "one process alone is held to the definition of these, but of fp16 only its loss scale and skipped "
             "steps, and not of 3 ranks")
    if not work.quick or not rest:
        return never
    worlds = ", ".join(map(str, sorted({case.world for case in rest})))
    dtypes = ", ".join(dict.fromkeys(case.dtype for case in rest))
    return (f"--quick leaves out {len(rest)} of {len(whole)} cases of these layouts: on {worlds} ranks, "
            f"in {dtypes} (without it all are run)\n{never}")


def divide(cases: Sequence[Case], device: str | None) -> tuple[list[Case], list[Skipped]]:
    """Those that can run here, and those that cannot."""
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in cases:
        try:
            resolve_case(case, device)
        except UserError as error:
            skipped.append(_skipped(case, error))
        else:
            legal.append(case)
    return legal, skipped


def _skipped(case: Case, why: UserError) -> Skipped:
    # An op that is not built is a state of this machine, and has a command that mends it.
    illegal = not (why.instead or "").startswith("ezpz-llm doctor")
    mend = "" if illegal or not why.instead else f" (type: {why.instead})"
    return Skipped(case, why.found + mend, illegal)


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
    quick: bool = False
    target: TargetFile | None = None


class _OldName(argparse.Action):
    """The name that an option had in the last release: works, and says the new one on stderr."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        print(f"note: {option_string} is now --{self.dest.replace('_', '-')}; the old name goes with the next "
              "release", file=sys.stderr)
        setattr(namespace, self.dest, values)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = CommandParser("certify", description=_DESCRIPTION, shown=(
        "ezpz-llm certify  every layout, on ranks of this machine",
        "launch -n 4 python3 -m ezpz_llm.certify --layouts pp2_tp2,zero3  on the ranks of a reservation"))
    made.add_argument("--layouts", default="all", metavar="all|NAME,…",
                      help="names in ds_configs/, or paths (%(default)s)")
    made.add_argument("--world", metavar="N,…",
                      help="numbers of ranks (each layout's natural ones, up to 4; 8 for 3d)")
    made.add_argument("--model", default=",".join(recipe.MODELS), metavar="NAME,…",
                      help="shapes (%(default)s; these two in a still smaller size)")
    made.add_argument("--target", metavar="FILE.py:FUNCTION",
                      help=f"certify a training of your own, which FUNCTION() gives as an ezpz_llm.Target, under "
                           f"{', '.join(LAYOUTS)}")
    made.add_argument("--recheck", type=Path, metavar="FILE.json",
                      help="run what a certificate is of once more, here, and say whether it holds")
    made.add_argument("--dtype", metavar="NAME,…",
                      help=f"({','.join(recipe.DTYPES)}; of a --target {','.join(DTYPES)})")
    made.add_argument("--steps", type=int, metavar="K",
                      help=f"optimizer steps ({recipe.STEPS}, with --quick {recipe.QUICK_STEPS})")
    made.add_argument("--quick", action="store_true",
                      help="each layout in every --model, in the first --dtype and its smallest world of several "
                           "ranks; and one of each kind of layout in bf16")
    made.add_argument("--inject-fault", metavar="NAME,…",
                      help=f"inject faults, one after the other; it must then fail: {', '.join(FAULTS)}")
    made.add_argument("--plant", dest="inject_fault", action=_OldName, help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all numbers with versions and seeds")
    made.add_argument("--write-docs", action="store_true", help="write the table into docs/reference/layouts.md")
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
    steps = options.steps
    if steps is None:
        steps = recipe.QUICK_STEPS if options.quick else recipe.STEPS
    if steps < 3:
        raise UserError(f"{steps} steps are too few to see a steady one", where="--steps",
                        instead="3 or more")
    _check_outputs(options)
    if options.target is not None:
        return _plan_target(options, world_size, steps)
    layouts = ds_config.names() if options.layouts == "all" else _words(options.layouts, "--layouts")
    models, dtypes = _words(options.model, "--model"), _dtypes(options, recipe.DTYPES)
    _check_layouts(layouts)
    _check_known(models, tuple(MODELS), "model", "--model")
    worlds = _worlds(options.world, world_size)
    device = "cpu" if options.device == "auto" else options.device
    cases, skipped = divide((quick_cases if options.quick else all_cases)(layouts, worlds, models, dtypes), device)
    if not cases and not any(not one.illegal for one in skipped):
        reasons = "; ".join(dict.fromkeys(f"{one.case.layout}: {one.reason}" for one in skipped))
        natural = sorted({world for name in layouts for world in natural_worlds(name)})
        raise UserError(f"there is nothing to certify ({reasons})", where="--layouts, --world",
                        instead=f"--world {' or '.join(map(str, natural))}")
    if options.inject_fault:
        cases = _with_faults(_words(options.inject_fault, "--inject-fault"), cases)
    return Work(tuple(cases), tuple(skipped), steps, options.device, options.quick)


def _plan_target(options: argparse.Namespace, world_size: int | None, steps: int) -> Work:
    """Return the cases of a target: each layout in its smallest world of several ranks, or in those asked for."""
    file = find_target(options.target)
    for name, other in {"--model": options.model != ",".join(recipe.MODELS), "--quick": options.quick,
                        "--inject-fault": options.inject_fault, "--write-docs": options.write_docs}.items():
        if other:
            raise UserError("a target is a training of its own, with faults of its own", where=name,
                            instead=f"--target without {name}")
    layouts = list(LAYOUTS) if options.layouts == "all" else _words(options.layouts, "--layouts")
    _check_layouts(layouts)
    for name in layouts:
        layout = layout_of(name)
        if layout.pp * layout.sp > 1 or layout.zero.tiled:
            raise UserError(f"{name} cuts layers, of which certify knows those of the trainer's own models alone",
                            where="--layouts", instead=",".join(LAYOUTS))
    dtypes = _dtypes(options, DTYPES)
    worlds = _worlds(options.world, world_size)
    cases = [Case(name, world, file.title, dtype) for name in layouts
             for world in worlds or [size for size in natural_worlds(name) if size > 1][:1] for dtype in dtypes]
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in sorted(cases, key=lambda case: case.world):
        try:
            resolve(Request(case.layout, world_size=case.world, micro_batch=1, accumulation=ACCUMULATION,
                            precision=case.dtype, device="cpu" if options.device == "auto" else options.device))
        except UserError as error:
            skipped.append(_skipped(case, error))
        else:
            legal.append(case)
    if not cases or not legal:
        raise UserError("there is nothing to certify ("
                        + "; ".join(dict.fromkeys(f"{one.case.layout}: {one.reason}" for one in skipped)) + ")",
                        where="--layouts, --world", instead="--world 2")
    return Work(tuple(legal), tuple(skipped), steps, options.device, target=file)


def _check_layouts(layouts: Sequence[str]) -> None:
    for name in layouts:
        try:
            layout_of(name)
        except UserError as error:
            raise UserError(error.found, where="--layouts", instead=error.instead) from None


def _dtypes(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    words = list(known) if options.dtype is None else _words(options.dtype, "--dtype")
    _check_known(words, known, "precision", "--dtype")
    return words


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
        fault = find_fault(name)
        reasons = {case: "its precision has no master weights"
                   if fault.of_masters and not RECIPES[case.dtype].has_masters
                   else fault.needs(layout_of(case.layout), case.world) for case in cases}
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


def _worlds(text: str | None, world_size: int | None) -> tuple[int, ...] | None:
    """The world sizes of `--world`; those of the ranks that are there, if any are."""
    words = [] if text is None else _words(text, "--world")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{text!r} is not a list of world sizes", where="--world", instead="--world 2,4")
    asked = tuple(map(int, words))
    if world_size is None:
        return asked or None
    if asked and world_size not in asked:
        raise UserError(f"started on {world_size} ranks, but asked for {text}", where="--world",
                        instead="no --world under launch, or certify alone, which starts ranks itself")
    return (world_size,)


def _check_known(words: Sequence[str], known: Sequence[str], kind: str, where: str) -> None:
    for word in words:
        if word not in known:
            raise unknown(kind, word, known, where=where)
