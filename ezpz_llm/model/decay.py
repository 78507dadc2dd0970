"""Which parameters weight decay pulls on."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups with keys "params", "names" and "weight_decay": first the decayed, then the others.

    Tensors with two or more dimensions (matrices and embeddings) decay; biases and norms do not. To be asked before
    an engine flattens parameters, which leaves them one dimension. A tied table is listed once.
    """
    named = list(model.named_parameters())
    decayed = [(name, p) for name, p in named if p.dim() >= 2]
    others = [(name, p) for name, p in named if p.dim() < 2]
    return [{"params": [p for _, p in group], "names": [name for name, _ in group], "weight_decay": decay}
            for group, decay in ((decayed, weight_decay), (others, 0.0))]
