"""Attention kernel for a model's shapes, and a blockwise kernel in bf16 for devices without a fused one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.torch_internals import fused_attention_choice, softmax_backward
from ezpz_llm.training.dist.version_rules import XPU_ATTENTION, find_rule
from ezpz_llm.training.model.config import ModelConfig


@dataclass(frozen=True)
class AttentionKernel:
    """Attention kernel and its memory for scores."""

    name: str
    """"blockwise_attention" (this module's), or torch's "flash_attention", "efficient_attention",
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

_ROWS = 128
"""Rows of a block: the fastest for 256 and 512 tokens, and 4 % slower than the fastest for 1024 (measured)."""
_ELEMENTS = 2 ** 25
"""Maximum number of scores in a block, which reduces its rows for very long sequences."""


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


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute causal attention by blocks of rows of the scores.

    Takes queries (B, H, T, D), keys and values (B, H_kv, T, D); returns (B, H, T, D) with memory layout (B, T, H,
    D).

    Args:
        mask: added to the scores, (B, 1, T, T); -inf for later tokens.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _BlockwiseAttention.apply(q, k, v, mask)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs (B, H, T, D); arguments as in `blockwise_attention`."""
        size, heads, length, dim = q.shape
        queries, keys, values = _kv_groups(q, k), _kv_groups(k, k)[:, 0], _kv_groups(v, k)[:, 0]
        out = q.new_empty(size, length, heads, dim).transpose(1, 2)
        for first, end in _blocks(queries):
            block = torch.bmm(_probabilities(queries, keys, first, end, mask), values[:, :end])
            out[:, :, first:end] = block.view(size, heads, end - first, dim)
        ctx.save_for_backward(queries, keys, values, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values."""
        queries, keys, values, mask = ctx.saved_tensors
        size, shared, length, dim = queries.shape
        grads = grad.reshape(queries.shape)
        query_grads = torch.empty_like(queries)
        # Later rows attend to all keys of earlier rows, so starting with the last block initializes all sums.
        key_grads: Any = None
        value_grads: Any = None
        for first, end in reversed(_blocks(queries)):
            probabilities = _probabilities(queries, keys, first, end, mask)
            row_grads = _rows(grads, first, end)
            rows = softmax_backward(torch.bmm(row_grads, values[:, :end].mT), probabilities, -1,
                                    probabilities.dtype)
            rows *= 1 / math.sqrt(dim)
            query_grads[:, :, first:end] = torch.bmm(rows, keys[:, :end]).view(size, shared, end - first, dim)
            block_key_grads = torch.bmm(rows.mT, _rows(queries, first, end))
            block_value_grads = torch.bmm(probabilities.mT, row_grads)
            if key_grads is None:
                key_grads, value_grads = block_key_grads, block_value_grads
                if first:
                    key_grads, value_grads = key_grads.float(), value_grads.float()
            else:
                key_grads[:, :end] += block_key_grads
                value_grads[:, :end] += block_value_grads
        whole, shape = grad.shape, (grad.shape[0], -1, length, dim)
        return (query_grads.view(whole), key_grads.to(keys.dtype).view(shape),
                value_grads.to(keys.dtype).view(shape), None)


def _kv_groups(heads: Tensor, keys: Tensor) -> Tensor:
    """Reshape (B, H, T, D) to (P, R, T, D).

    There are P = B H_kv pairs of a sequence and a key/value head, with R = H / H_kv query heads each.
    """
    return heads.reshape(keys.shape[0] * keys.shape[1], -1, *heads.shape[2:])


def _rows(heads: Tensor, first: int, end: int) -> Tensor:
    """Return rows [first, end) of (P, R, T, D) as (P, R n, D), with n = end - first."""
    return heads[:, :, first:end].flatten(1, 2)


def _blocks(queries: Tensor) -> list[tuple[int, int]]:
    """Return start and end of each block of rows."""
    size, shared, length, _ = queries.shape
    rows = max(1, min(_ROWS, _ELEMENTS // (size * shared * length)))
    return [(first, min(first + rows, length)) for first in range(0, length, rows)]


def _probabilities(queries: Tensor, keys: Tensor, first: int, end: int, mask: Tensor | None) -> Tensor:
    """Compute the softmax of a block's scores, (P, R n, end)."""
    rows, count = _rows(queries, first, end), end - first
    scores = torch.bmm(rows, keys[:, :end].mT)
    scores *= 1 / math.sqrt(queries.shape[-1])
    if mask is None:
        later = torch.full((count, count), -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
        scores.view(len(keys), -1, count, end)[..., first:] += later
    else:
        scores.view(len(mask), -1, count, end).add_(mask[:, :, first:end, :end])
    return torch.softmax(scores, dim=-1)
