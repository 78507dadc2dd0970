"""The part of a model that a rank computes under its layout, with its first values."""

from __future__ import annotations

import torch
from torch import nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.engine.layout import Layout
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.init import init_weights


def assemble(config: ModelConfig, layout: Layout, mesh: Mesh, seed: int) -> nn.Module:
    """Build the plain model, cut it as the layout says, and give what is left its first values.

    Until then nothing has storage: a rank never holds more than its own part, and one whole parameter at a time.
    Every layout starts from exactly the single-process values.
    """
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    model.to_empty(device="cpu")
    init_weights(model, config, seed)
    return model
