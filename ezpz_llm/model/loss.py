"""The training loss of logits: negative log-likelihood in nats, in fp32 whatever the logits' dtype.

Shapes: B sequences, T tokens, N = B T, V padded vocabulary, R ranks that have V/R columns each (one rank has all).

The z-loss adds z log(Z)^2 a token to what is minimised, where Z normalises the softmax; it keeps logits from
drifting (Chowdhery et al. 2022, arXiv:2204.02311, with z = 1e-4). The value of a loss stays the likelihood's, so
that losses of runs with and without it compare; only its gradient has the further term.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ezpz_llm.data.samples import IGNORED
from ezpz_llm.model.vocabulary import Columns

Reduction = Literal["mean", "sum", "rows"]
"""Over all targets that count: their mean, 0-d; their sum, 0-d; the sum of each sequence, (B,)."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction = "mean", z_loss: float = 0.0,
                  columns: Columns = Columns()) -> Tensor:  # noqa: B008 (a frozen value)
    """Logits (B, T, V/R) and targets (B, T) to an fp32 tensor, see Reduction; targets of -100 count in none.

    Keeps the logits for the backward pass, and makes several tensors of their size in fp32.
    """
    flat, aims = logits.flatten(0, -2), targets.flatten()
    if columns.ranks > 1:
        return reduced(_TokenLosses.apply(flat, aims, z_loss, columns), targets, reduction)
    losses = functional.cross_entropy(flat.float(), aims, ignore_index=IGNORED, reduction="none")
    if z_loss:
        term = z_loss * torch.logsumexp(flat.float(), dim=-1).square() * (aims != IGNORED)
        losses = losses + (term - term.detach())
    return reduced(losses, targets, reduction)


def reduced(losses: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """The losses (N) of targets (B, T), those that do not count being 0."""
    if reduction == "rows":
        return losses.view(targets.shape).sum(dim=-1)
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _TokenLosses(torch.autograd.Function):
    """Logits (N, V/R) and targets (N) to the negative log-likelihoods (N) in fp32, 0 where a target is ignored.

    The gradient needs no communication: a softmax's columns follow from the logits and the normaliser alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float, columns: Columns) -> Tensor:
        index, inside = columns.own(targets, logits.shape[-1])
        own = torch.logsumexp(logits.float(), dim=-1)
        chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
        normaliser, chosen = columns.join(own, chosen)
        counted = targets != IGNORED
        ctx.save_for_backward(logits, normaliser, index, inside, counted)
        ctx.z_loss = z_loss
        return (normaliser - chosen) * counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normaliser, index, inside, counted = ctx.saved_tensors
        result = logits.float().sub(normaliser[:, None]).exp_()
        if ctx.z_loss:
            result.mul_((1 + 2 * ctx.z_loss * normaliser)[:, None])
        result.scatter_add_(1, index[:, None], -inside[:, None].float())
        return result.mul_((grad * counted)[:, None]).to(logits.dtype), None, None, None
