"""Which parameters weight decay pulls on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.gpt import GPT


def decay_counts(config: ModelConfig) -> list[tuple[int, int]]:
    """Tensors and their elements in the two groups of the whole model, whatever a rank holds of it."""
    with torch.device("meta"):
        groups = decay_groups(GPT(config), 0.0)
    return [(len(group["params"]), sum(parameter.numel() for parameter in group["params"])) for group in groups]


def parameter_names(config: ModelConfig) -> list[str]:
    """Of the whole model, whatever a rank holds of it; a tied table is listed once."""
    with torch.device("meta"):
        return [name for name, _ in GPT(config).named_parameters()]


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
