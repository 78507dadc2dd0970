"""Which attention kernel the model's shapes get, and what the slow one costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.row_attention import by_rows
from ezpz_llm.private_names import fused_attention_choice


@dataclass(frozen=True)
class AttentionKernel:
    """What computes attention."""

    name: str
    """row_attention, ours for hosts; of torch's flash_attention, efficient_attention, cudnn_attention, overrideable
    (the device's own), or math."""
    score_bytes: int
    """What the math kernel keeps of one layer's scores for the backward pass, B H T^2 values; 0 for the others."""


def attention_kernel(config: ModelConfig, micro_batch: int, device: torch.device,
                     dtype: torch.dtype, explicit: bool = False) -> AttentionKernel:
    """Which kernel trains with `micro_batch` full sequences: ours, or the one that torch says it takes.

    `dtype` is that of the products: bfloat16 under autocast. The answer changes with the shape: fp32, dropout or
    grouped queries may rule out the fast kernels. `explicit`: the math kernel was asked for.
    """
    if by_rows(device, dtype, config.dropout) and not explicit:
        return AttentionKernel("row_attention", 0)

    def heads(count: int) -> torch.Tensor:
        return torch.empty(micro_batch, count, config.block_size, config.head_dim, device=device, dtype=dtype,
                           requires_grad=True)

    keys = heads(config.n_kv_head)
    # The same question that scaled_dot_product_attention asks itself; torch has no public name for it.
    choice = fused_attention_choice(heads(config.n_head), keys, keys, dropout_p=config.dropout, is_causal=True,
                                    enable_gqa=config.n_head != config.n_kv_head)
    backend = SDPBackend.MATH if explicit else SDPBackend(choice)
    scores = micro_batch * config.n_head * config.block_size ** 2 * dtype.itemsize
    return AttentionKernel(backend.name.lower(), scores if backend == SDPBackend.MATH else 0)
