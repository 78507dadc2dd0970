"""Cases to certify (layout, model, precision, world size), and command-line options (imports no torch)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import MAX_RANKS, UserError, shorten_value, unknown_name_error, whole_number
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.layout import Layout, read_layout
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.verify.certify import recipe
from ezpz_llm.verify.certify.injected_faults import FAULTS, find_fault
from ezpz_llm.verify.certify.target_file import ACCUMULATION, DTYPES, LAYOUTS, TargetFile, find_target

_DP_SIZES = (1, 2, 4)
_MAX_RANKS = 4
_WORLDS = {"3d": (8,), "zero3_hpz2": (4,), "fsdp2_within2": (4,)}
"""World sizes of layouts that are exceptions to `natural_worlds`. The third dimension of 3d is data-parallel.
Subgroups of two ranks differ from the whole group only on more than two ranks."""
_PATHS_WORLDS = {"pp2": (6,)}
"""World sizes of layouts that are exceptions to `paths_worlds`. A pipeline sums the gradient of a tied table in two
steps on three or more data-parallel ranks."""

_ALSO_BF16 = ("ddp", "fsdp2", "zero1", "zero3", "zero3_offload_optimizer", "tiled", "tp2_zero1", "tp2_zero3", "sp2",
              "pp2", "pp2_tp2")
"""Layouts that --quick also certifies in the last dtype (bf16 by default), one of each kind."""

_MAX_STEPS = 10_000
_MAX_CASES = 2_000
"""Maximum number of cases: all layouts, models and precisions are 293. Planning a case takes 2 ms."""
_MAX_WORLDS = 16

_UNCOVERED_PATHS = "dropout, fp16, the data reader"
"""Code paths that no case exercises, even without --quick."""

_PATHS_OF = {"recomputation, ignored targets": {recipe.PATHS, recipe.WIDE}, "document masks": {recipe.WIDE},
             "z-loss, 3 ranks": {recipe.PATHS}}
"""Code paths that only cases of some models exercise."""


@dataclass(frozen=True)
class Case:
    """Layout, world size, model, precision and optional injected fault."""

    layout: str
    world: int
    model: str
    dtype: str
    fault: str | None = None

    @property
    def title(self) -> str:
        """Description for a line of output."""
        fault = f" with {self.fault}" if self.fault else ""
        return f"{self.layout} {self.model} {self.dtype} on {self.world} rank{'s' * (self.world > 1)}{fault}"


@dataclass(frozen=True)
class Skipped:
    """A case that cannot run, and why.

    `illegal` means that no machine can run it. Otherwise this machine lacks a compiled op, and `reason` names the
    command that builds it.
    """

    case: Case
    reason: str
    illegal: bool


def load_layout(name: str) -> Layout:
    """Load the layout of a ds_config, by name or path."""
    return read_layout(ds_config.load(name))


def natural_worlds(name: str) -> tuple[int, ...]:
    """Return the world sizes to certify by default: 1, 2 or 4 data-parallel ranks, at most 4 ranks (3d: 8)."""
    layout = load_layout(name)
    unit = layout.tp * layout.pp * layout.sp
    return _WORLDS.get(layout.name) or tuple(unit * size for size in _DP_SIZES if unit * size <= _MAX_RANKS)


def resolve_case(case: Case, device: str | None) -> Resolved:
    """Resolve the case's layout with the recipe's batch, clipping and model.

    Raises:
        UserError: the case cannot run.
    """
    pipeline, shape = load_layout(case.layout).pp > 1, recipe.shape(case.model)
    accumulation = recipe.PIPELINE_ACCUMULATION if pipeline else recipe.ACCUMULATION
    if shape.micro_batches:
        # `resolve` rejects worlds that are too small, or do not divide the batch.
        accumulation = shape.micro_batches // max(1, load_layout(case.layout).dp_size(case.world))
    resolved = resolve(Request(case.layout, world_size=case.world, global_batch=shape.global_batch,
                               clip=recipe.CLIP, accumulation=accumulation,
                               precision=case.dtype, device=device, model=shape.config))
    if resolved.deepspeed is None:
        return resolved
    zero = scaled_down(resolved.deepspeed["zero_optimization"], resolved.layout.zero.stage)
    deepspeed = {**resolved.deepspeed, "zero_optimization": zero}
    if "aio" in deepspeed:
        deepspeed["aio"] = {**deepspeed["aio"], "block_size": recipe.SMALLEST_FILE}
    return replace(resolved, deepspeed=deepspeed)


def scaled_down(zero: dict[str, Any], stage: int | None,
                parameters: int = recipe.SCALED_FOR) -> dict[str, Any]:
    """Return a "zero_optimization" block with buckets and thresholds scaled to a model of that size."""
    # DeepSpeed requires buckets that are a multiple of 2 (nccl_start_alignment_factor).
    limits = {key: max(2, value * parameters // recipe.SCALED_FOR // 2 * 2) for key, value in recipe.SCALED.items()}
    return {**zero, **{key: min(zero.get(key, value), value) for key, value in limits.items()
                       if stage == 3 or (key.endswith("bucket_size") and not key.startswith("stage3"))}}


def paths_worlds(name: str) -> tuple[int, ...]:
    """Return the world sizes of `tiny-paths`: the largest natural one, and 3 for data-parallel layouts."""
    worlds = natural_worlds(name)
    return _PATHS_WORLDS.get(name) or (*((3,) if worlds == _DP_SIZES else ()), worlds[-1])


def all_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
              dtypes: Sequence[str]) -> list[Case]:
    """Return every combination, sorted by world size.

    Without `worlds`, each layout has its natural world sizes, or those of `paths_worlds`; `tiny-wide` the largest.
    `tiny-paths` runs only in the first dtype, `tiny-wide` in the first and the last. It replaces `tiny-gpt2`, of
    which it has all layers, if `tiny-gpt2` also runs on fewer ranks.
    """
    worlds_of = {recipe.PATHS: paths_worlds, recipe.WIDE: lambda layout: natural_worlds(layout)[-1:]}
    dtypes_of = {recipe.PATHS: dtypes[:1], recipe.WIDE: list(dict.fromkeys((dtypes[0], dtypes[-1])))}
    cases = [Case(layout, world, model, dtype) for layout in layouts for model in models
             for world in worlds or worlds_of.get(model, natural_worlds)(layout)
             for dtype in dtypes_of.get(model, dtypes)]
    fewest = {layout: min(worlds or natural_worlds(layout)) for layout in layouts}
    replaced = {replace(case, model=recipe.GPT2) for case in cases
                if case.model == recipe.WIDE and case.world > fewest[case.layout]}
    return sorted((case for case in cases if case not in replaced), key=lambda case: case.world)


def quick_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
                dtypes: Sequence[str]) -> list[Case]:
    """Return the cases of --quick.

    Each layout runs in its smallest multi-rank world (among `worlds`, if given) with the first dtype and each
    model, except `tiny-paths` unless it is the only one, and `tiny-gpt2`, of which `tiny-wide` has all layers. One
    layout of each kind also runs in the last dtype that it supports, with the first model. The default first model
    is `tiny-gpt2`, because rounding to bf16 changes its gradients by a sixth as much as those of `tiny-llama`.
    """
    cases = []
    models = [name for name in models if name != recipe.PATHS] or models
    exact = [name for name in models if not (name == recipe.GPT2 and recipe.WIDE in models)]
    for layout in layouts:
        sizes = [size for size in natural_worlds(layout) if worlds is None or size in worlds] or list(worlds or ())
        world = next((size for size in sizes if size > 1), sizes[0])
        cases += [Case(layout, world, model, dtypes[0]) for model in exact]
        if layout in _ALSO_BF16:
            rounded = [Case(layout, world, models[0], dtype) for dtype in reversed(dtypes[1:])]
            # Keep a case that only lacks a compiled op: it must be reported as missing, not replaced by another
            # dtype.
            illegal = {skipped.case for skipped in split_runnable(rounded, None)[1] if skipped.illegal}
            cases += [case for case in rounded if case not in illegal][:1]
    return sorted(cases, key=lambda case: case.world)


def omitted_cases(work: Work) -> str:
    """Return lines that name the cases omitted by --quick and the code paths that no case exercises."""
    layouts = list(dict.fromkeys(case.layout for case in work.cases))
    whole, _ = split_runnable(all_cases(layouts, None, recipe.ALL_MODELS, recipe.DTYPES), None)
    omitted = [case for case in whole if case not in work.cases]
    run = {case.model for case in work.cases}
    paths = [_UNCOVERED_PATHS, *(path for path, having in _PATHS_OF.items() if not run & having)]
    uncovered = (f"not covered by any layout: {', '.join(paths)}\n"
                 "one process is checked with ignored targets and a z-loss")
    if not work.quick or not omitted:
        return uncovered
    worlds = ", ".join(map(str, sorted({case.world for case in omitted})))
    dtypes = ", ".join(dict.fromkeys(case.dtype for case in omitted))
    models = ", ".join(dict.fromkeys(case.model for case in omitted))
    return (f"--quick omits {len(omitted)} of {len(whole)} cases of these layouts: on {worlds} ranks, "
            f"in {dtypes}, of {models} (omit --quick to run them)\n{uncovered}")


def split_runnable(cases: Sequence[Case], device: str | None) -> tuple[list[Case], list[Skipped]]:
    """Split cases into those that can run on this machine and those that cannot."""
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in cases:
        try:
            resolve_case(case, device)
        except UserError as error:
            skipped.append(_make_skipped(case, error))
        else:
            legal.append(case)
    return legal, skipped


def _make_skipped(case: Case, error: UserError) -> Skipped:
    # A missing op depends on the machine, and has a command that builds it.
    illegal = not (error.instead or "").startswith("ezpz-llm doctor")
    fix = "" if illegal or not error.instead else f" (type: {error.instead})"
    return Skipped(case, error.found + fix, illegal)


_DESCRIPTION = """Check that every parallel layout computes the same results as a single process.

All layouts start from one checkpoint and train on the same tokens. certify compares the loss and gradient norm of
each step, the first gradient of every parameter, and the weights after the last step. Without launch, certify runs
the reference and then one launch per world size; under launch, it runs the cases that fit the world size.
Exit code 0 only if every case passes.
"""


@dataclass(frozen=True)
class Work:
    """Cases to run, skipped cases, and settings of the run."""

    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]
    steps: int
    device: str
    quick: bool = False
    target: TargetFile | None = None


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = CommandParser("certify", description=_DESCRIPTION, shown=(
        "ezpz-llm certify  every layout, on this machine",
        "launch -n 4 python3 -m ezpz_llm.certify --layouts pp2_tp2,zero3  on the nodes of an allocation"))
    parser.add_argument("--layouts", default="all", metavar="all|NAME,…",
                        help="ds_configs by name (in ds_configs/) or path (%(default)s)")
    parser.add_argument("--world", metavar="N,…",
                        help="world sizes (default: those that suit each layout, up to 4; pp2 also 6, 3d 8)")
    parser.add_argument("--model", metavar="NAME,…",
                        help=f"model shapes ({','.join(recipe.ALL_MODELS)}; certify scales the tiny ones down "
                             "further)")
    parser.add_argument("--target", metavar="FILE.py:FUNCTION",
                        help=f"certify your own training: FUNCTION() returns an ezpz_llm.Target. Layouts: "
                           f"{', '.join(LAYOUTS)}")
    parser.add_argument("--recheck", type=Path, metavar="FILE.json",
                        help="run a certificate's command again and check that the certificate holds on this "
                             "machine")
    parser.add_argument("--dtype", metavar="NAME,…",
                        help=f"precisions ({','.join(recipe.DTYPES)}; with --target {','.join(DTYPES)})")
    parser.add_argument("--steps", type=int, metavar="K",
                        help=f"optimizer steps ({recipe.STEPS}, with --quick {recipe.QUICK_STEPS})")
    parser.add_argument("--quick", action="store_true",
                        help="run each layout with every --model, in the first --dtype, in its smallest multi-rank "
                           "world; and one layout of each kind in bf16")
    parser.add_argument("--inject-fault", metavar="NAME,…",
                        help=f"inject faults, one at a time; certify must then fail: {', '.join(FAULTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers with versions and seeds")
    parser.add_argument("--write-docs", action="store_true",
                        help="write the table into benchmarks/results/certified.md")
    parser.add_argument("--device", default="auto", choices=("auto", *DEVICES),
                        help="device type (%(default)s)")
    parser.add_argument("--run-dir", type=Path, metavar="D",
                        help="output directory (default: launch's, or a new one in runs/)")
    parser.add_argument("--check", action="store_true", help="only validate the options (imports no torch)")
    parser.add_argument("--world-size", type=int, metavar="N", help="world size, for --check under launch")
    return parser


def plan(options: argparse.Namespace, world_size: int | None = None) -> Work:
    """Return the cases that the options select.

    Args:
        world_size: world size under launch; only cases with this world size are kept.

    Raises:
        UserError: a name is unknown, an option is invalid, a fault applies to no case, or no case is left.
    """
    steps = options.steps
    if steps is None:
        steps = recipe.QUICK_STEPS if options.quick else recipe.STEPS
    if not 3 <= steps <= _MAX_STEPS:
        raise UserError(f"--steps {shorten_value(steps)} is too {'few' if steps < 3 else 'many'}", where="--steps",
                        instead=f"--steps 3 or more, to measure a steady-state step, up to {_MAX_STEPS}")
    _check_outputs(options)
    if options.target is not None:
        return _plan_target(options, world_size, steps)
    layouts = ds_config.names() if options.layouts == "all" else _split_list(options.layouts, "--layouts")
    models = list(recipe.ALL_MODELS) if options.model is None else _split_list(options.model, "--model")
    dtypes = _dtypes(options, recipe.DTYPES)
    _check_layouts(layouts)
    _check_known(models, (*MODELS, recipe.PATHS, recipe.WIDE), "model", "--model")
    worlds = _worlds(options.world, world_size)
    device = "cpu" if options.device == "auto" else options.device
    select_cases = quick_cases if options.quick else all_cases
    candidates = select_cases(layouts, worlds, models, dtypes)
    _check_count(candidates)
    cases, skipped = split_runnable(candidates, device)
    if not cases and not any(not each.illegal for each in skipped):
        reasons = "; ".join(dict.fromkeys(f"{each.case.layout}: {each.reason}" for each in skipped))
        natural = sorted({world for name in layouts for world in natural_worlds(name)})
        raise UserError(f"there is nothing to certify ({reasons})", where="--layouts, --world",
                        instead=f"--world {' or '.join(map(str, natural))}")
    if options.inject_fault:
        cases = _with_faults(_split_list(options.inject_fault, "--inject-fault"), cases)
    return Work(tuple(cases), tuple(skipped), steps, options.device, options.quick)


def _plan_target(options: argparse.Namespace, world_size: int | None, steps: int) -> Work:
    """Return the cases of a target: each layout in the requested world sizes, or in its smallest above 1."""
    file = find_target(options.target)
    for name, is_set in {"--model": options.model is not None, "--quick": options.quick,
                         "--inject-fault": options.inject_fault, "--write-docs": options.write_docs}.items():
        if is_set:
            raise UserError(f"{name} does not work with --target", where=name, instead=f"--target without {name}")
    layouts = list(LAYOUTS) if options.layouts == "all" else _split_list(options.layouts, "--layouts")
    _check_layouts(layouts)
    for name in layouts:
        layout = load_layout(name)
        if layout.pp * layout.sp > 1 or layout.zero.tiled:
            raise UserError(f"{name} splits layers, which certify supports only for the trainer's own models",
                            where="--layouts", instead=f"--layouts {','.join(LAYOUTS)}")
    dtypes = _dtypes(options, DTYPES)
    worlds = _worlds(options.world, world_size)
    cases = [Case(name, world, file.title, dtype) for name in layouts
             for world in worlds or [size for size in natural_worlds(name) if size > 1][:1] for dtype in dtypes]
    _check_count(cases)
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in sorted(cases, key=lambda case: case.world):
        try:
            resolve(Request(case.layout, world_size=case.world, micro_batch=1, accumulation=ACCUMULATION,
                            precision=case.dtype, device="cpu" if options.device == "auto" else options.device))
        except UserError as error:
            skipped.append(_make_skipped(case, error))
        else:
            legal.append(case)
    if not cases or not legal:
        raise UserError("there is nothing to certify ("
                        + "; ".join(dict.fromkeys(f"{each.case.layout}: {each.reason}" for each in skipped)) + ")",
                        where="--layouts, --world", instead="--world 2")
    return Work(tuple(legal), tuple(skipped), steps, options.device, target=file)


def _check_count(cases: Sequence[Case]) -> None:
    if len(cases) > _MAX_CASES:
        raise UserError(f"{len(cases)} cases are more than {_MAX_CASES}", where="--layouts, --world",
                        instead="fewer layouts or world sizes")


def _check_layouts(layouts: Sequence[str]) -> None:
    for name in layouts:
        try:
            load_layout(name)
        except UserError as error:
            raise UserError(error.found, where="--layouts", instead=error.instead) from None


def _dtypes(options: argparse.Namespace, supported: Sequence[str]) -> list[str]:
    dtypes = list(supported) if options.dtype is None else _split_list(options.dtype, "--dtype")
    _check_known(dtypes, supported, "precision", "--dtype")
    return dtypes


def _check_outputs(options: argparse.Namespace) -> None:
    if options.write_docs and (options.layouts != "all" or options.quick or options.inject_fault or options.world):
        raise UserError("the table in the docs has a row for every layout and needs the whole matrix",
                        where="--write-docs", instead="no --layouts, --world, --quick or --inject-fault")
    if options.json is not None and options.json.is_dir():
        raise UserError(f"{options.json} is a directory", where="--json",
                        instead=f"--json {options.json / 'certify.json'}")


def _with_faults(names: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """Return each case with each fault that applies to it.

    Raises:
        UserError: a fault applies to no case.
    """
    faulty = []
    for name in names:
        fault = find_fault(name)
        reasons = {case: f"{case.dtype} has no master weights"
                   if fault.needs_masters and not RECIPES[case.dtype].has_masters
                   else fault.needs(load_layout(case.layout), case.world) for case in cases}
        faulty += [replace(case, fault=name) for case, reason in reasons.items() if reason is None]
        if None not in reasons.values():
            text = "; ".join(dict.fromkeys(f"{case.layout} on {case.world} rank{'s' * (case.world > 1)}: {reason}"
                                           for case, reason in reasons.items()))
            raise UserError(f"cannot inject {name} into {text}", where="--inject-fault",
                            instead="other --layouts, or --world 2")
    return sorted(faulty, key=lambda case: case.world)


def _split_list(text: str, where: str) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise UserError(f"{where} is an empty list", where=where, instead=f"{where} NAME,NAME")
    return names


def _worlds(text: str | None, world_size: int | None) -> tuple[int, ...] | None:
    """Return the world sizes in `--world`, the actual one under launch, or None for each layout's default."""
    sizes = [] if text is None else _split_list(text, "--world")
    requested = tuple(whole_number(size) or 0 for size in sizes)
    if not all(1 <= size <= MAX_RANKS for size in requested) or len(requested) > _MAX_WORLDS:
        raise UserError(f"{shorten_value(text)} is not a list of up to {_MAX_WORLDS} world sizes", where="--world",
                        instead="--world 2,4")
    if world_size is None:
        return requested or None
    if requested and world_size not in requested:
        raise UserError(f"launch started {world_size} ranks, but --world is {text}", where="--world",
                        instead="launch without --world, or certify without launch, which starts its own ranks")

    return (world_size,)


def _check_known(names: Sequence[str], valid: Sequence[str], kind: str, where: str) -> None:
    for name in names:
        if name not in valid:
            raise unknown_name_error(kind, name, valid, where=where)
