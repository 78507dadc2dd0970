"""Trained model to evaluate: its source, layout and engine.

Planning imports no torch, so that mistakes are found before any rank starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.core.rundir.records import RunRecord, read_record
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.hf.source import Source, find_source, with_model_changes
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import COMMAND_LINE, DEFAULT
from ezpz_llm.training.model.config import ModelConfig

if TYPE_CHECKING:
    from ezpz_llm.training.dist import Dist
    from ezpz_llm.training.engine.base import Engine

SOURCE_HELP = "a run directory, a checkpoint, or a Hugging Face folder or hub id"


@dataclass(frozen=True)
class ModelPlan:
    """Model to evaluate, and its layout over ranks."""

    source: Source
    model: ModelConfig
    resolved: Resolved

    @property
    def run_record(self) -> RunRecord:
        """Content of run.json of the run that saved the checkpoint; without members if unknown."""
        if self.source.kind != "checkpoint":
            return RunRecord()
        return read_record(RunDir(self.source.folder.parent.parent))


@contextmanager
def as_rank(options: argparse.Namespace, name: str) -> Iterator[Dist]:
    """Set up this process as a rank, and remove a temporary run directory afterwards. Collective."""
    from ezpz_llm.training.dist.setup import setup

    dist = setup(device=options.device, run_dir=options.run_dir, name=name)
    try:
        with dist:
            yield dist
    finally:
        remove_temporary_run(options, dist)


def remove_temporary_run(options: argparse.Namespace, dist: Dist) -> None:
    """Remove a run directory that neither the user nor launch named.

    It is not a training run, but commands that default to the newest run in runs/ would use it.
    """
    if dist.is_main and options.run_dir is None and RUN_DIR_VARIABLE not in os.environ:
        shutil.rmtree(dist.run_dir.path, ignore_errors=True)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all tasks on a trained model have."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument("--device", default="auto", choices=("auto", *DEVICES), help="(default: %(default)s)")
    parser.add_argument("--run-dir", type=Path, metavar="D",
                        help="record the result in run.json there (default: only print it)")
    parser.add_argument("--check", action="store_true", help="only check the options (no torch)")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks, for --check")


def add_arguments(parser: argparse.ArgumentParser, batch: int) -> None:
    """Add the options of tasks that our engines run; `batch` is the default of --batch."""
    add_common_arguments(parser)
    parser.add_argument("--ds-config", default="ddp", metavar="NAME|PATH",
                        help="parallel layout (default: %(default)s)")
    for name, dimension in (("tp", "tensor"), ("pp", "pipeline"), ("sp", "sequence")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{dimension}-parallel degree")
    parser.add_argument("--batch", type=int, default=batch, metavar="N",
                        help="sequences per forward pass of a rank (default: %(default)s)")
    parser.add_argument("--block-size", type=int, metavar="N",
                        help="context length in tokens (default: the model's)")
    parser.add_argument("--precision", default="auto", choices=("auto", *RECIPES),
                        help="precision of the forward pass; auto is train's default on the device "
                             "(default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="NAME|FOLDER",
                        help="bytes, gpt2, a tokenizer.json, a SentencePiece *.model, or a folder with one of "
                             "these; evaluate warns if it differs from the tokenizer of SOURCE (default: that "
                             "tokenizer)")


def plan_model(options: argparse.Namespace, world_size: int) -> ModelPlan:
    """Find the model and its layout.

    Raises:
        UserError: the model does not exist, or the layout cannot shard it.
    """
    for name, value in (("batch", options.batch), ("world-size", world_size), ("block-size", options.block_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}", where=f"--{name}", instead="1 or more")
    source = find_source(options.source, "SOURCE")
    model = with_model_changes(source.model, str(source.folder), dropout=0.0, block_size=options.block_size)

    def resolve_for(model: ModelConfig | None) -> Resolved:
        """Resolve the layout for a model; for None, without checks that depend on the model."""
        return resolve(Request(options.ds_config, world_size=world_size, micro_batch=options.batch, accumulation=1,
                               precision=options.precision, device=options.device, tp=options.tp, pp=options.pp,
                               sp=options.sp, model=model,
                               sources={"precision": DEFAULT if options.precision == "auto" else COMMAND_LINE}))

    if source.kind != "checkpoint":
        # Pad the vocabulary as little as possible, so that the loss equals the published model's.
        model = replace(model, vocab_multiple=options.tp or resolve_for(None).layout.tp)
    return ModelPlan(source, model, resolve_for(model))


def open_model(plan: ModelPlan, dist: Dist) -> Engine:
    """Build the model in the engine of its layout, on its device; use it inside `Engine.evaluating`. Collective.

    Raises:
        UserError: the weights are damaged or not finite; the same on every rank.
    """
    from ezpz_llm.training.engine.build import assemble, build_engine
    from ezpz_llm.training.engine.precision import native_precision
    from ezpz_llm.training.hf.weights import open_for_ranks
    from ezpz_llm.training.model.init import decay_groups

    resolved, layout = plan.resolved, plan.resolved.layout
    if resolved.precision == "auto":
        resolved = replace(resolved, precision=native_precision(dist.device, layout))
    dist.arrange(tp=layout.tp, pp=layout.pp, sp=layout.sp)
    with open_for_ranks(plan.source, dist) as weights:
        module = assemble(plan.model, layout, dist.mesh, 0, dist.device.type, weights.read)
        # The engine shards the parameters. It requires an optimizer, which never steps.
        engine = build_engine(module, resolved, dist, lr=1.0, betas=(0.9, 0.95), eps=1e-8,
                              param_groups=decay_groups(module, 0.0))
        weights.check_finite(dist)
        return engine
