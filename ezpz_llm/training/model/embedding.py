"""Token embedding, tied or untied, and lookups in a vocabulary that is sharded over ranks.

Shapes: B sequences, T tokens, N any number of tokens, C width, V padded vocabulary size, R ranks. Rank r has the
rows of token ids [r V/R, (r + 1) V/R).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional


@dataclass(frozen=True)
class Columns:
    """Columns of the logits on this rank: part `rank` of `ranks` equal parts.

    Attributes:
        group: process group of the ranks; None for the whole world, as in torch.
    """

    rank: int = 0
    ranks: int = 1
    group: ProcessGroup | None = None

    def own(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return targets (N) as indices into this rank's columns (0 for others), and a mask of local targets."""
        return local_rows(targets, self.rank * width, width)

    def join(self, normalizer: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ranks' log-sum-exp and target logit, (N) each in fp32, into those of all columns.

        Uses one small all-gather, with two numbers per token and rank.
        """
        if self.ranks == 1:
            return normalizer, chosen
        local = torch.stack((normalizer, chosen))
        parts = [torch.empty_like(local) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, local, group=self.group)
        normalizers, chosen = torch.stack(parts, dim=1)  # each (R, N)
        return torch.logsumexp(normalizers, dim=0), chosen.sum(dim=0)


def local_rows(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return indices into rows [first, first + count), 0 for other tokens, and a mask of tokens in these rows."""
    index = tokens - first
    inside = (index >= 0) & (index < count)
    return index * inside, inside


def lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up rows (..., C) in an embedding (V, C), whose gradient is summed over tokens in fp32.

    For a 16-bit embedding on CPU, torch rounds the sum after each token, which loses most of a frequent token's
    gradient.
    """
    if weight.device.type == "cpu" and weight.dtype != torch.float32:
        return _Lookup.apply(tokens, weight, False)
    return functional.embedding(tokens, weight)


class TiedEmbedding(nn.Embedding):
    """Embedding of V tokens in C dimensions.

    Attributes:
        tied: True if the output head has the same weight. The backward pass then also computes the head's dense
            gradient. On CPU, the lookup therefore returns a sparse gradient, which autograd adds to the dense one;
            a dense gradient of the lookup would be mostly zeros. (torch 2.13 adds the rows to a copy of the head's
            gradient, not in place.)
    """

    tied = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up rows (B, T, C) for tokens (B, T)."""
        if self.tied and self.weight.device.type == "cpu":
            return _Lookup.apply(tokens, self.weight, True)
        return lookup(tokens, self.weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, rows_only: bool) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.dtype, ctx.rows_only = weight.shape, weight.dtype, rows_only
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient of the table (V, C), whose rows are summed in fp32."""
        tokens, = ctx.saved_tensors
        index, rows = tokens.flatten(), grad.flatten(0, -2)
        if ctx.dtype != torch.float32:
            index, inverse = index.unique(return_inverse=True)
            total = torch.zeros(len(index), rows.shape[1], device=rows.device)
            rows = total.index_add_(0, inverse, rows.float()).to(ctx.dtype)
        if ctx.rows_only:
            return None, torch.sparse_coo_tensor(index[None], rows, ctx.shape, check_invariants=False), None
        return None, rows.new_zeros(ctx.shape).index_copy_(0, index, rows), None
