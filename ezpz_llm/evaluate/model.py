"""A trained model for evaluation: which one, how it is divided, and the engine that computes it.

Planning imports no torch, so that a mistake is found before any rank starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.hf.source import Source, find_source
from ezpz_llm.layout.resolve import Resolved, resolve
from ezpz_llm.model.compile import eager
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.rundir import RunDir, read_record

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist
    from ezpz_llm.engine.base import Engine

SOURCE_HELP = "a run directory, a checkpoint, or a folder or hub id of Hugging Face's"


@dataclass(frozen=True)
class ModelPlan:
    """Model to evaluate, and its layout over ranks."""

    source: Source
    model: ModelConfig
    resolved: Resolved

    @property
    def run_record(self) -> Mapping[str, Any]:
        """run.json of the run that saved the checkpoint; empty where it is not known."""
        if self.source.kind != "checkpoint":
            return {}
        return read_record(RunDir(self.source.folder.parent.parent))


def add_arguments(parser: argparse.ArgumentParser, batch: int) -> None:
    """The options that every command on a trained model has; `batch` is the default of --batch."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument("--ds-config", default="ddp", metavar="NAME|PATH", help="the parallel layout (%(default)s)")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("sp", "sequence")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}-parallel degree")
    parser.add_argument("--batch", type=int, default=batch, metavar="N",
                        help="sequences that a rank takes at once (%(default)s)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"),
                        help="of the forward pass; auto is bf16 where the device computes in it (%(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", *DEVICES), help="(%(default)s)")
    parser.add_argument("--tokenizer", metavar="NAME|FOLDER",
                        help="bytes, gpt2, or a folder that has one: token shards, a checkpoint, a tokenizer.json; "
                             "another than the source's gives a warning (the source's own)")
    parser.add_argument("--run-dir", type=Path, metavar="D",
                        help="where to write (launch's, or a new one in runs/)")
    parser.add_argument("--check", action="store_true", help="only find what is wrong with the options (no torch)")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="the number of ranks, for --check")


def plan_model(options: argparse.Namespace, world_size: int) -> ModelPlan:
    """Find the model and its layout.

    Raises:
        UserError: no such model, or a layout that cannot divide it.
    """
    if options.batch < 1 or world_size < 1:
        name, value = ("--batch", options.batch) if options.batch < 1 else ("--world-size", world_size)
        raise UserError(f"{name[2:]} is {value}", where=name, instead="1 or more")
    source = find_source(options.source, "SOURCE")
    model = replace(source.model, dropout=0.0)

    def resolved_for(model: ModelConfig | None) -> Resolved:
        return resolve(options.ds_config, world_size=world_size, micro_batch=options.batch, accumulation=1,
                       precision=options.precision, device=options.device, tp=options.tp, pp=options.pp,
                       sp=options.sp, model=model, sources={"precision": "--precision"})

    if source.kind == "hf":
        # Without padding where that is possible, so that a loss is the published model's.
        model = replace(model, vocab_multiple=1)
        tp = options.tp or resolved_for(None).layout.tp
        model = replace(model, vocab_multiple=tp)
    return ModelPlan(source, model, resolved_for(model))


def open_model(plan: ModelPlan, dist: Dist) -> Engine:
    """The model in the engine of its layout, on its device, for `Engine.evaluating`. Collective.

    Raises:
        UserError: the weights are damaged; the same on every rank.
    """
    from ezpz_llm.engine.build import assemble, build_engine
    from ezpz_llm.engine.precision import native_precision
    from ezpz_llm.hf.weights import open_for_ranks
    from ezpz_llm.model.init import decay_groups

    resolved, layout = plan.resolved, plan.resolved.layout
    if resolved.precision == "auto":
        resolved = replace(resolved, precision=native_precision(dist.device))
    dist.arrange(tp=layout.tp, pp=layout.pp, sp=layout.sp)
    with open_for_ranks(plan.source, dist) as weights:
        module = assemble(plan.model, layout, dist.mesh, 0, dist.device.type, weights.read)
    # Layouts that divide parameters do so in their engines, which want an optimizer; it never steps.
    return build_engine(module, resolved, dist, lr=1.0, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(module, 0.0))


# Text from a model, one token at a time.
@torch.no_grad()
def sample(next_logits: Callable[[Tensor], Tensor], prompt_ids: Tensor, *, new_tokens: int,
           generator: torch.Generator, block_size: int, vocab_size: int, top_k: int | None = 50,
           temperature: float = 1.0) -> Tensor:
    """Extend prompts (B, T), at least one token each, to (B, T + new_tokens).

    The draws are made on the host with the caller's own `generator` (a CPU one), so that the same seed and logits
    give the same text on any device, and the global random state stays as it was. Every rank runs the same number
    of forward passes, so all ranks of a sharded model can sample together. There is no cache of keys and values:
    each token costs a forward pass over its context.

    Args:
        next_logits: tokens (B, T) to logits (B, V) of the token that follows, in evaluation mode (dropout off).
        block_size: the longest context that the model takes; earlier tokens fall out of sight.
        vocab_size: the tokenizer's; ids from here to V are padding and are never drawn.
        top_k: draw among the k likeliest tokens; None for all.
        temperature: above 0; divides the logits.
    """
    ids = prompt_ids
    with eager():
        for _ in range(new_tokens):
            logits = next_logits(ids[:, -block_size:])[:, :vocab_size].float().cpu() / temperature
            if top_k is None:
                candidates = torch.arange(vocab_size).expand(len(logits), -1)
            else:
                logits, candidates = logits.topk(min(top_k, vocab_size))
            drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat((ids, candidates.gather(1, drawn).to(ids.device)), dim=1)
    return ids
