"""Attention kernel for a model's shapes and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.torch_internals import fused_attention_choice
from ezpz_llm.training.dist.version_rules import XPU_ATTENTION, find_rule
from ezpz_llm.training.model.config import ModelConfig


@dataclass(frozen=True)
class AttentionKernel:
    """Attention kernel and its memory for scores."""

    name: str
    """"blockwise_attention" (`blockwise_attention.py`), or torch's "flash_attention", "efficient_attention",
    "cudnn_attention", "overrideable" (of the device) or "math"."""
    score_bytes: int
    """Bytes of a layer's scores that the math kernel keeps for the backward pass (B H T^2 values); 0 for others."""


def attention_kernel(config: ModelConfig, micro_batch: int, device: torch.device,
                     dtype: torch.dtype, explicit: bool = False, masked: bool = False) -> AttentionKernel:
    """Return the kernel for training with `micro_batch` full sequences: the blockwise one, or torch's choice.

    fp32, dropout or grouped-query attention may rule out the fast kernels.

    Args:
        dtype: dtype of the matmuls; bfloat16 under autocast.
        explicit: True if the math kernel is requested.
        masked: True with masks between documents.
    """
    if not explicit and is_blockwise(device, dtype, config.dropout, masked):
        return AttentionKernel("blockwise_attention", 0)
    scores = micro_batch * config.n_head * config.block_size ** 2 * dtype.itemsize
    if explicit or not _has_fused_kernel(device, masked):
        return AttentionKernel(SDPBackend.MATH.name.lower(), scores)

    def heads(count: int) -> torch.Tensor:
        return torch.empty(micro_batch, count, config.block_size, config.head_dim, device=device, dtype=dtype,
                           requires_grad=True)

    keys = heads(config.n_head if masked else config.n_kv_head)  # as in `CausalProduct`
    mask = torch.empty(micro_batch, 1, config.block_size, config.block_size, device=device,
                       dtype=dtype) if masked else None
    # scaled_dot_product_attention calls the same function, which has no public name.
    choice = fused_attention_choice(heads(config.n_head), keys, keys, mask, dropout_p=config.dropout,
                                    is_causal=not masked, enable_gqa=keys.shape[1] != config.n_head)
    backend = SDPBackend(choice)
    return AttentionKernel(backend.name.lower(), scores if backend == SDPBackend.MATH else 0)


_LACKS_XPU_ATTENTION = find_rule("torch", torch.__version__, XPU_ATTENTION) is not None

def is_blockwise(device: torch.device, dtype: torch.dtype, dropout: float, masked: bool = False) -> bool:
    """Return True if `blockwise_attention` is the kernel for matmuls of this dtype.

    It is faster than torch's kernel on CPUs, and replaces torch's math kernel on devices that have no fused one.
    """
    return (dtype == torch.bfloat16 and not dropout
            and (device.type == "cpu" or not _has_fused_kernel(device, masked)))


def _has_fused_kernel(device: torch.device, masked: bool) -> bool:
    """Return True if torch has a fused kernel with gradients. Its own choice of a kernel may ignore gradients."""
    traits = DEVICES.get(device.type)
    if traits is None:
        return True  # the meta device
    return (traits.masked_attention or not masked) and not (device.type == "xpu" and _LACKS_XPU_ATTENTION)
