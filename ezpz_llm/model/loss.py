"""The training loss, as a module so that a vocabulary-parallel one can take its place."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

Reduction = Literal["mean", "sum", "rows"]
"""Over all targets that count: their mean, 0-d; their sum, 0-d; the sum of each sequence, (B,)."""


class CrossEntropy(nn.Module):
    """Negative log-likelihood in nats, computed in fp32 whatever the logits' dtype."""

    def forward(self, logits: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Logits (B, T, V) and targets (B, T) to an fp32 tensor, see Reduction; targets of -100 count in none."""
        if reduction == "rows":
            losses = functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
            return losses.view(targets.shape).sum(dim=-1)
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction=reduction)
