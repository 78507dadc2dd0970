"""What a step is, what it costs, and what the device could do."""

from __future__ import annotations

from ezpz_llm.dist import Dist
from ezpz_llm.engine.precision import set_products
from ezpz_llm.model.flop_check import count_flops
from ezpz_llm.model.flops import FlopCount
from ezpz_llm.observe import StepWork, measure_ceiling, peak_flops
from ezpz_llm.observe.progress import short_number
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
