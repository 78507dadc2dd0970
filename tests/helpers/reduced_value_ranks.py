"""Run by several ranks: compare reduced bf16 gradients and tensor-parallel sums with the exact sums of inputs.

Usage: mpiexec -n 4 python3 reduced_value_ranks.py FOLDER RUN…, a RUN being `tp` for the sums of tensor parallelism,
or LAYOUT:ACCUMULATED:REDUCED with the dtypes in which gradients are accumulated and reduced.

A result is the largest error of an element, relative to the sum of its inputs' absolute values.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from rank_jobs import sequences, take_runs
from torch import Tensor, nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.engine import gradient_reducer
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.model.tensor_parallel import sum_gradients
from ezpz_llm.training.model.tp_collectives import copy_to_tp_region, reduce_from_tp_region

GLOBAL_BATCH, ACCUMULATION, SEED = 8, 2, 1337
# Untied, because a pipeline adds the two gradients of a tied table in another dtype than one process.
CONFIG = get_model_config("tiny-llama", n_layer=2, n_head=2, n_kv_head=1, n_embd=32, intermediate_size=48,
                          block_size=16, vocab_size=64, tied=False)
LOSS_FACTOR = 2.0**-20
"""Factor that makes gradients smaller than the smallest number of fp16."""
gradient_reducer.BUCKET = 4000  # several buckets


def reduced_gradients(dist: Dist, run: str) -> float:
    """Return the largest error of the gradients that the optimizer gets, on this rank."""
    layout, accumulated, reduced = run.split(":")
    resolved = resolve(Request(layout, world_size=dist.world_size, clip=0.0, global_batch=GLOBAL_BATCH,
                               accumulation=ACCUMULATION, precision="bf16", grad_accum_dtype=accumulated,
                               reduce_dtype=reduced, device="cpu"))
    dist.arrange(tp=1, pp=resolved.layout.pp, sp=1)
    model = assemble(CONFIG, resolved.layout, dist.mesh, SEED)
    scale_loss(model)
    # Without a decay of the first moment, it is the gradient after a step.
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.0, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    size = GLOBAL_BATCH // ACCUMULATION // dist.mesh.dp_size
    batches = [(part[:, :-1], part[:, 1:])
               for part in sequences(0, GLOBAL_BATCH, CONFIG.block_size + 1).split(size)]
    own = batches[dist.mesh.dp_rank * ACCUMULATION:][:ACCUMULATION]
    engine.train_step(own, 1e-3, lambda phase: nullcontext())
    inputs = plain_gradients(batches)
    errors = []
    for piece in engine.training_state().slices():
        box = (slice(None), *(slice(*side) for side in piece.box))
        each = inputs[piece.name][box].flatten(1)[:, piece.start:piece.stop]
        errors.append(largest_error(piece.tensors["exp_avg"].flatten() * len(each), each))
    return max(errors)


def scale_loss(model: nn.Module) -> None:
    """Multiply the loss by LOSS_FACTOR, which is exact."""
    for name, module in model.named_modules():
        if name == "lm_head":  # in a pipeline, of the last stage
            module.register_forward_hook(lambda module, inputs, loss: loss * LOSS_FACTOR)


def plain_gradients(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the bf16 gradients of each micro-batch by one process, stacked, in fp64."""
    model = GPT(CONFIG)
    init_weights(model, CONFIG, SEED)
    scale_loss(model.to(torch.bfloat16))
    gradients: list[dict[str, Tensor]] = []
    for tokens, targets in batches:
        model.zero_grad()
        model(tokens, targets).backward()
        gradients.append({name: parameter.grad.double() for name, parameter in model.named_parameters()})
    return {name: torch.stack([each[name] for each in gradients]) for name in gradients[0]}


def largest_error(total: Tensor, inputs: Tensor) -> float:
    """Return the largest error of a sum of inputs (N, …), relative to the sum of their absolute values."""
    error = (total.double() - inputs.double().sum(0)).abs()
    sizes = inputs.double().abs().sum(0)
    assert not error[sizes == 0].any()
    return (error[sizes > 0] / sizes[sizes > 0]).max().item() if sizes.any() else 0.0


def tensor_parallel_sums(dist: Dist) -> dict[str, float]:
    """Return the errors of sums over tensor-parallel ranks, forward and backward, and of summed gradients."""
    dist.arrange(tp=dist.world_size)
    # Magnitudes from 1e-9 to 10, beyond the range of fp16.
    generator = torch.Generator().manual_seed(dist.rank)
    exponents = torch.empty(64, 32).uniform_(-9, 1, generator=generator)
    mine = (torch.randn(64, 32, generator=generator) * 10**exponents).bfloat16()
    parts = torch.stack(all_gather(dist, mine))
    x = torch.zeros_like(mine, requires_grad=True)
    copy_to_tp_region(x, None).backward(mine)
    result = {"forward": largest_error(reduce_from_tp_region(mine, None), parts),
              "backward": largest_error(x.grad, parts)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result["autocast"] = largest_error(reduce_from_tp_region(mine, None), parts)
    return {**result, "gains": summed_gains(dist)}


def summed_gains(dist: Dist) -> float:
    """Return the largest error of the gradients of gains that each rank uses for its own heads."""
    config = replace(CONFIG, qk_norm="head")
    model = GPT(config)
    init_weights(model, config, SEED)
    model.to(torch.bfloat16)
    gains = {name: parameter for name, parameter in model.named_parameters() if "head_norm" in name}
    mine: dict[str, Tensor] = {}
    for name, parameter in gains.items():
        parameter.register_hook(lambda gradient, name=name: mine.update({name: gradient.clone()}))
    sum_gradients(model, None)
    tokens = sequences(dist.rank, 2, config.block_size + 1)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return max(largest_error(parameter.grad, torch.stack(all_gather(dist, mine[name])))
               for name, parameter in gains.items())


def measure(dist: Dist, run: str) -> Any:
    """Return the errors of a run, the largest of all ranks."""
    if run == "tp":
        ranks = all_gather(dist, tensor_parallel_sums(dist))
        return {name: max(errors[name] for errors in ranks) for name in ranks[0]}
    error = max(all_gather(dist, reduced_gradients(dist, run)))
    assert math.isfinite(error)
    return error


if __name__ == "__main__":
    take_runs(measure)
