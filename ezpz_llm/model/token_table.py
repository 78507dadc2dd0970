"""The token table, whose gradient is added to the head's where both are one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class TokenTable(nn.Embedding):
    """An embedding of V tokens in C dimensions.

    `tied`: the head's product has the same weight, whose dense gradient comes in the same backward pass. On a host
    the lookup's own is then given as rows, which autograd adds to it: dense it would be V rows of zeros but for the
    few that were looked up. (torch 2.13 adds them to a copy of the head's, not in place.)
    """

    tied = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to rows (B, T, C)."""
        if self.tied and self.weight.device.type == "cpu":
            return _Lookup.apply(tokens, self.weight)
        return super().forward(tokens)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        tokens, = ctx.saved_tensors
        return None, torch.sparse_coo_tensor(tokens.flatten()[None], grad.flatten(0, -2), ctx.shape,
                                             check_invariants=False)
