"""The vocabulary divided over ranks: the token table, and the loss of logits that no rank has whole.

Shapes: B sequences, T tokens, C width, V padded vocabulary, R ranks. Rank r has tokens r V/R up to (r + 1) V/R.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ezpz_llm.data.samples import IGNORED
from ezpz_llm.model.loss import Reduction
from ezpz_llm.model.peers import leave_region


class VocabularyEmbedding(nn.Module):
    """A token table of which this rank has some rows. Exact: of the ranks' parts of a sum all but one are zero."""

    def __init__(self, rows: int, width: int, group: ProcessGroup | None, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.group, self.first = group, rank * rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to activations (B, T, C)."""
        index, inside = _own(tokens, self.first, len(self.weight))
        rows = functional.embedding(index, self.weight)
        return leave_region(rows.masked_fill(~inside[..., None], 0.0), self.group)


class VocabularyCrossEntropy(nn.Module):
    """The plain model's loss, from logits of which each rank has the columns of its own tokens.

    One small collective: each rank sends two numbers a token.
    """

    def __init__(self, group: ProcessGroup | None, rank: int, ranks: int) -> None:
        super().__init__()
        self.group, self.rank, self.ranks = group, rank, ranks

    def forward(self, logits: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Logits (B, T, V/R) and targets (B, T) to an fp32 tensor, see Reduction; targets of -100 count in none."""
        shape, targets = targets.shape, targets.flatten()
        losses = _TokenLosses.apply(logits.flatten(0, -2), targets, self.group, self.rank, self.ranks)
        if reduction == "rows":
            return losses.view(shape).sum(dim=-1)
        total = losses.sum()
        return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _TokenLosses(torch.autograd.Function):
    """Logits (N, V/R) and targets (N) to the negative log-likelihoods (N) in fp32, 0 where a target is ignored.

    The gradient needs no communication: a softmax's columns follow from the logits and the normaliser alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None, rank: int,
                ranks: int) -> Tensor:
        width = logits.shape[-1]
        index, inside = _own(targets, rank * width, width)
        own = torch.logsumexp(logits.float(), dim=-1)
        chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
        mine = torch.stack((own, chosen))
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(parts, mine, group=group)
        normalisers, chosen = torch.stack(parts, dim=1)  # each (R, N)
        normaliser = torch.logsumexp(normalisers, dim=0)
        counted = targets != IGNORED
        ctx.save_for_backward(logits, normaliser, index, inside, counted)
        return (normaliser - chosen.sum(dim=0)) * counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, normaliser, index, inside, counted = ctx.saved_tensors
        result = logits.float().sub(normaliser[:, None]).exp_()
        result.scatter_add_(1, index[:, None], -inside[:, None].float())
        return result.mul_((grad * counted)[:, None]).to(logits.dtype), None, None, None, None


def _own(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows, 0 for what lies elsewhere, and which tokens lie here."""
    index = tokens - first
    inside = (index >= 0) & (index < count)
    return index * inside, inside
