"""Causal attention by blocks of rows of the scores, in bf16 on devices without a fused kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ezpz_llm.training.dist.torch_internals import softmax_backward

_ROWS = 128
"""Rows of a block: the fastest for 256 and 512 tokens, and 4 % slower than the fastest for 1024 (measured)."""
_ELEMENTS = 2 ** 25
"""Maximum number of scores in a block, which reduces its rows for very long sequences."""


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
        queries, keys, values = _kv_groups(q, k), _kv_groups(k, k)[:, 0], _kv_groups(v, k)[:, 0]
        ctx.save_for_backward(queries, keys, values, mask)
        attend = _attend if torch.compiler.is_compiling() else BLOCKWISE_OPERATOR
        return attend(queries, keys, values, mask, len(q))

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


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, size: int) -> Tensor:
    """Return the outputs (B, H, T, D) for queries (P, R, T, D), keys and values (P, T, D), with B = `size`."""
    pairs, shared, length, dim = queries.shape
    heads = pairs * shared // size
    out = queries.new_empty(size, length, heads, dim).transpose(1, 2)
    for first, end in _blocks(queries):
        block = torch.bmm(_probabilities(queries, keys, first, end, mask), values[:, :end])
        out[:, :, first:end] = block.view(size, heads, end - first, dim)
    return out


_LIBRARY = torch.library.Library("ezpz_llm", "DEF")
_LIBRARY.define("blockwise_attention(Tensor queries, Tensor keys, Tensor values, Tensor? mask, int size) -> Tensor")
_LIBRARY.impl("blockwise_attention", _attend, "CompositeExplicitAutograd")
BLOCKWISE_OPERATOR = torch.ops.ezpz_llm.blockwise_attention.default
"""`_attend` as one operator, whose output selective recomputation can keep."""


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
