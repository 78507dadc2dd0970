"""Check of --types: the distributed types of every layout, on one rank of a fake world (imports torch on use).

It is independent of certify's numeric comparison, with which it shares no code.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from ezpz_llm.core.base import (
    UserError,
    count_noun,
    import_package,
    print_lines,
    require_package,
    unknown_name_error,
)
from ezpz_llm.launcher.basics.ranks import ALONE
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.constraints import validate
from ezpz_llm.training.layout.knobs import LayoutCheck
from ezpz_llm.training.layout.layout import Layout, read_layout
from ezpz_llm.training.model.config import MODELS, ModelConfig, get_model_config

WORLD = 4096
SHAPES = ("tiny-gpt2", "tiny-llama")
_NORMS_OF_HEADS = ("tiny-qwen3", "tiny-olmo2")
"""Models with norms within attention, which tensor parallelism shards or sums; checked under tp2 too."""
_LAYERS = 2
_NUMERIC_OPTIONS = ("world", "target", "recheck", "dtype", "steps", "quick", "inject_fault", "json", "write_docs",
                    "run_dir")


def run(options: Namespace, source: str) -> int:
    """Check all layouts and models of the options; return 0 if all types are correct, else 1.

    Args:
        source: where the rank of this process comes from; see `find_rank`.

    Raises:
        UserError: an option does not apply to --types, or spmd_types is not installed.
    """
    cases = _cases(options)
    if source != ALONE or (options.world_size or 1) > 1:
        raise UserError("--types checks one rank of a fake world, not the ranks of launch", where="--types",
                        instead="ezpz-llm certify --types, without launch")
    require_package("spmd_types", "certify --types", "types", where="--types")
    if options.check:
        return 0
    began, is_new = time.process_time(), "torch" not in sys.modules
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # the tensors are tiny, and waiting threads use CPU time
    importing = time.process_time() - began
    import_package("spmd_types", "certify --types", "types", where="--types")  # fails with an older torch
    failures, notes = 0, []
    for layout, configs in cases:
        faults = {name: fault for name, config in configs.items() if (fault := find_fault(layout, config))}
        failures += len(faults)
        own_notes = list(_not_typed(layout))
        notes += [note for note in own_notes if note not in notes]
        print_lines(f"{'FAIL' if faults else 'ok':4}  {layout.name:24}{', '.join(configs):48}not typed: "
                    f"{', '.join(str(notes.index(note) + 1) for note in own_notes)}")
        for name, fault in faults.items():
            print_lines(f"      {layout.name}, {name}: {fault}")
    print_lines("\n".join(["not typed:", *(f"  {number} {note}" for number, note in enumerate(notes, 1))]))
    seconds = time.process_time() - began
    share = f"{importing:.1f} s of it importing torch" if is_new else "torch was imported before"
    print_lines(f"{count_noun(failures, 'wrong type') if failures else 'no wrong types'} in "
                f"{count_noun(len(cases), 'layout')}, on one of {WORLD:,} fake ranks "
                f"({seconds:.1f} s of CPU time, {share})")
    return 1 if failures else 0


def find_fault(layout: Layout, config: ModelConfig) -> str | None:
    """Return the module, the operation and the types of the first error in a layout's program, or None."""
    import spmd_types

    from ezpz_llm.verify.certify.type_program import fake_rank, run_program
    from ezpz_llm.verify.certify.type_reduction import check_reduction

    for stage in range(layout.pp):
        with fake_rank(layout, config, stage, WORLD) as rank:
            try:
                run_program(rank)
                check_reduction(rank)
            except spmd_types.SpmdTypeError as error:
                return f"{rank.program.where[-1]}: {_describe(error, rank.program.axes)}"
    return None


def _describe(error: Any, axes: dict[str, Any]) -> str:
    """Return the first line of an error, with the operation and the names of axes."""
    text = error.args[0].splitlines()[0].replace("PerMeshAxisLocalSpmdType.", "")
    if operation := re.search(r"In (\w+)\(", error.context or ""):
        text = f"{operation[1]}: {text}"
    for name, axis in axes.items():
        text = text.replace(repr(axis), name)
    return text


def _not_typed(layout: Layout) -> Iterator[str]:
    """Yield the parts of a layout's program that the types do not cover."""
    if layout.engine == "ddp":
        yield "the reduction of fp32 gradients (its group is checked, and all of its class in bf16)"
    elif layout.engine == "fsdp2":
        yield "torch's gathers of parameters and reduction of gradients (their groups are checked)"
    else:
        yield "DeepSpeed's reduction of gradients (its groups are checked)"
        if layout.zero.stage:
            yield "DeepSpeed's partitioning and gradient norm (the marks of sharded parameters are checked)"
    if layout.sp > 1:
        yield "the backward pass of DeepSpeed's all-to-all"
    if layout.zero.stage == 3:
        yield "DeepSpeed's gathers of parameters: modules run with whole ones"
    if layout.zero.offload_optimizer or layout.zero.offload_param:
        yield "DeepSpeed's copies to and from offloaded memory"
    if layout.pp > 1:
        yield "sends between stages, and the sum of a tied embedding over stages, which are different programs"


def _cases(options: Namespace) -> list[tuple[Layout, dict[str, ModelConfig]]]:
    """Return the layouts to check, each with its models by name."""
    for name in _NUMERIC_OPTIONS:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} does not work with --types", where=flag, instead=f"--types without {flag}")
    shapes = SHAPES if options.model is None else tuple(filter(None, options.model.split(",")))
    for name in shapes:
        if name not in MODELS:
            raise unknown_name_error("model", name, tuple(MODELS), where="--model")
    names = ds_config.names() if options.layouts == "all" else options.layouts.split(",")
    cases = []
    for layout in map(_read_layout, filter(None, names)):
        models: Sequence[str] = (*shapes, *_NORMS_OF_HEADS) if layout.name == "tp2" and shapes == SHAPES else shapes
        configs = {name: get_model_config(name, n_layer=max(_LAYERS, layout.pp)) for name in models}
        for config in configs.values():
            problem = validate(LayoutCheck(layout, WORLD, config))[2]
            if problem is not None:
                raise UserError(problem.message, where="--layouts")
        cases.append((layout, configs))
    return cases


def _read_layout(name: str) -> Layout:
    try:
        return read_layout(ds_config.load(name))
    except UserError as error:
        raise UserError(error.found, where="--layouts", instead=error.instead) from None
