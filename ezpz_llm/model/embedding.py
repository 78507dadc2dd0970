"""The embedding table, tied or not, and which rows of a vocabulary that is divided over ranks lie on one.

Shapes: B sequences, T tokens, N any number of tokens, C width, V padded vocabulary, R ranks. Rank r has tokens
r V/R up to (r + 1) V/R.
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
    """Which of the logits' columns a rank has: part number `rank` of `ranks` equal ones.

    `group` is None for the whole world, as in torch. One rank alone has all of them and needs no group.
    """

    rank: int = 0
    ranks: int = 1
    group: ProcessGroup | None = None

    def own(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Targets (N) as indices into this rank's `width` columns, 0 for those elsewhere, and which lie here."""
        return own_rows(targets, self.rank * width, width)

    def join(self, normaliser: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp and the target's logit, (N) each in fp32, of all columns, from those of each rank's.

        One small collective: each rank sends two numbers a token.
        """
        if self.ranks == 1:
            return normaliser, chosen
        mine = torch.stack((normaliser, chosen))
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, mine, group=self.group)
        normalisers, chosen = torch.stack(parts, dim=1)  # each (R, N)
        return torch.logsumexp(normalisers, dim=0), chosen.sum(dim=0)


def own_rows(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Indices into rows [first, first + count), 0 for what lies elsewhere, and which tokens lie here."""
    index = tokens - first
    inside = (index >= 0) & (index < count)
    return index * inside, inside


def lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows (..., C) of a table (V, C); a row's gradient is the sum over its tokens, in fp32 before it is rounded.

    On CPU torch rounds a table of two bytes after each token, which loses most of a frequent token's gradient.
    """
    if weight.device.type == "cpu" and weight.dtype != torch.float32:
        return _Lookup.apply(tokens, weight, False)
    return functional.embedding(tokens, weight)


# The embedding table, whose gradient is added to the head's where both are one tensor.
class TiedEmbedding(nn.Embedding):
    """An embedding of V tokens in C dimensions.

    `tied`: the head's product has the same weight, whose dense gradient comes in the same backward pass. On CPU
    the lookup's own is then given as rows, which autograd adds to it: dense it would be V rows of zeros but for the
    few that were looked up. (torch 2.13 adds them to a copy of the head's, not in place.)
    """

    tied = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to rows (B, T, C)."""
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
        tokens, = ctx.saved_tensors
        index, rows = tokens.flatten(), grad.flatten(0, -2)
        if ctx.dtype != torch.float32:
            index, place = index.unique(return_inverse=True)
            total = torch.zeros(len(index), rows.shape[1], device=rows.device)
            rows = total.index_add_(0, place, rows.float()).to(ctx.dtype)
        if ctx.rows_only:
            return None, torch.sparse_coo_tensor(index[None], rows, ctx.shape, check_invariants=False), None
        return None, rows.new_zeros(ctx.shape).index_copy_(0, index, rows), None
