"""Estimated memory of a run before it starts, and a warning if CPU ranks need more than their node has."""

from __future__ import annotations

from dataclasses import replace

import torch

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.rundir.layout_record import Batch
from ezpz_llm.training.engine.precision import matmul_dtype
from ezpz_llm.training.layout.memory import Pass, activation_bytes, memory_per_rank, total, unsharded_bytes
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.layout.value_source import COMMAND_LINE, Origin
from ezpz_llm.training.model.attention_kernels import attention_kernel
from ezpz_llm.training.model.loss import most_logits_on
from ezpz_llm.training.model.loss_chunk import choose_chunk
from ezpz_llm.training.trainer.plan import RunPlan

_SHORTEST = 64
"""Shortest context to suggest, in tokens."""


def forward_pass(plan: RunPlan, device: torch.device) -> Pass:
    """Return the sizes that determine the activations of a rank."""
    config, model, batch, precision = plan.config, plan.model, plan.resolved.batch, plan.resolved.precision
    kernel = attention_kernel(model, batch.micro_batch, device, matmul_dtype(precision),
                              config.attention == "explicit", config.mask_documents)
    chunk = config.loss_chunk
    if chunk is None:
        chunk = choose_chunk(batch.micro_batch * model.block_size // plan.resolved.layout.sp,
                             model.padded_vocab_size // plan.resolved.layout.tp, most_logits_on(device))
    return Pass(batch.micro_batch, batch.accumulation, precision, config.recompute, kernel.score_bytes, chunk,
                device.type == "cpu", kernel.name == "blockwise_attention", config.mask_documents)


def memory_warning(plan: RunPlan, world_size: int, local_size: int, node_bytes: int) -> str | None:
    """Return a warning if the CPU ranks of a node need more than its memory, with options that fit.

    Args:
        local_size: ranks on the node.
    """
    needed = local_size * _rank_bytes(plan, world_size)
    if needed <= node_bytes:
        return None
    return (f"{count_noun(local_size, 'rank')} with {plan.resolved.batch.micro_batch} x {plan.model.block_size} "
            f"tokens per micro-step will need about {needed / 1e9:,.0f} GB on this node, which has "
            f"{node_bytes / 1e9:,.0f} GB: " + _fitting_options(plan, world_size, node_bytes / local_size))


def _rank_bytes(plan: RunPlan, world_size: int) -> int:
    """Return the estimated bytes of a rank on CPUs, without Python and libraries."""
    resolved, model = plan.resolved, plan.model
    parts = memory_per_rank(resolved.layout, model, world_size, resolved.optimizer, resolved.precision,
                            resolved.gradients)
    return (total(parts, "device") + total(parts, "host")
            + unsharded_bytes(resolved.layout, model, resolved.precision, resolved.batch.accumulation)
            + activation_bytes(resolved.layout, model, forward_pass(plan, torch.device("cpu"))))


def _fitting_options(plan: RunPlan, world_size: int, limit: float) -> str:
    """Return options whose estimate is at most `limit` bytes per rank, with the longest possible context."""
    batch, block_size = _with_smallest_micro_batch(plan.resolved), plan.model.block_size
    while block_size >= _SHORTEST:
        smaller = replace(plan, model=replace(plan.model, block_size=block_size),
                          resolved=replace(plan.resolved, batch=batch))
        if _rank_bytes(smaller, world_size) <= limit:
            options = "--micro-batch-size 1"
            # Of three numbers on the command line, none is overridden: they must agree.
            if (plan.resolved.sources["accumulation"] == COMMAND_LINE
                    and batch.accumulation != plan.resolved.batch.accumulation):
                options += f" --gradient-accumulation-steps {batch.accumulation}"
            if block_size < plan.model.block_size:
                options += f" --block-size {block_size}"
            return f"pass {options}"
        block_size //= 2
    return "use a layout that shards more, or more nodes"


def _with_smallest_micro_batch(resolved: Resolved) -> Batch:
    """Return the batch with `--micro-batch-size 1`, which keeps the global batch or else the accumulation."""
    batch = resolved.batch
    of_global, of_accumulation = (resolved.sources[name].origin for name in ("global_batch", "accumulation"))
    if of_global is Origin.DERIVED or of_global.rank > of_accumulation.rank:
        return Batch(batch.accumulation * batch.dp_size, 1, batch.accumulation, batch.dp_size)
    return Batch(batch.global_batch, 1, batch.global_batch // batch.dp_size, batch.dp_size)
