"""The training loss, as a module so that a vocabulary-parallel one can take its place."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

Reduction = Literal["mean", "sum"]

class CrossEntropy(nn.Module):
    """Negative log-likelihood in nats, computed in fp32 whatever the logits' dtype."""

    def forward(self, logits: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Logits (B, T, V) and targets (B, T) to a 0-d fp32 tensor; a target of -100 counts in no sum or mean."""
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction=reduction)
