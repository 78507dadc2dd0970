"""Work of a step: its tokens and FLOPs, and the matmul peak of the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.dist import Dist
from ezpz_llm.engine.precision import set_products
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.flops import FlopCount, flops_per_token, product_flops_per_token
from ezpz_llm.model.gpt import GPT, CausalProduct
from ezpz_llm.model.head import configure_head
from ezpz_llm.observe import StepWork, measure_ceiling, peak_flops
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.trainer.plan import RunPlan


def step_work(plan: RunPlan, dist: Dist) -> tuple[StepWork, FlopCount]:
    """The work of a step, without FLOPs where the formula and torch's counter differ; and the count itself.

    To be called before there is a model on the device, whose memory the ceiling's matrices would need. Collective.
    """
    batch, precision = plan.resolved.batch, plan.resolved.precision
    set_products(dist.device, precision)
    flops = count_flops(plan.model)
    work = StepWork(batch.micro_batch, batch.accumulation, batch.dp_size, dist.world_size, plan.model.block_size,
                    flops_per_token=flops.model if flops.is_proven else None,
                    causal_flops_per_token=flops.causal if flops.is_proven else None,
                    peak=peak_flops(dist.device, precision), ceiling=measure_ceiling(dist, precision))
    return work, flops


def describe(work: StepWork, flops: FlopCount) -> list[tuple[str, str]]:
    """Both as rows of the announcement."""
    count = (f"{short_number(flops.model)} a token by 6N + 12 L C T, {short_number(flops.causal)} with causal "
             "attention")
    if flops.is_proven:
        rows = [("FLOPs", f"{count}; torch counts the same products")]
    else:
        rows = [("FLOPs", f"warning: {count}; {flops.products:.6g} of them in products, of which torch counts "
                          f"{flops.counted:.6g}: there will be no MFU")]
    if work.ceiling is not None:
        ceiling = work.ceiling
        slowest = (f", {short_number(ceiling.slowest_flops)} on the slowest rank, {ceiling.slowest_rank}"
                   if work.world_size > 1 else "")
        rows.append(("ceiling", f"{short_number(ceiling.flops)} FLOP/s in {ceiling.precision} products alone"
                                f"{slowest}"))
    return rows


# The formula for FLOPs beside torch's own counter, on a model without storage.
def count_flops(config: ModelConfig) -> FlopCount:
    """What a token costs, checked against the model itself.

    Blocks are all alike, so that a model of one and a model of two tell of any number: a tenth of a second.
    """
    one, two = (counted_flops(replace(config, n_layer=layers)) for layers in (1, 2))
    counted = (one + (config.n_layer - 1) * (two - one)) / config.block_size
    return FlopCount(flops_per_token(config), flops_per_token(config, causal=True), product_flops_per_token(config),
                     counted)


def counted_flops(config: ModelConfig) -> int:
    """Forward and backward of one whole sequence, as torch counts them on the meta device.

    Attention is taken by its definition: fused kernels compute the scores again in the backward pass, which torch
    counts and a model's FLOPs do not.
    """
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    configure_head(model, 0)
    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = True
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()
