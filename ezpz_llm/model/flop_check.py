"""The formula for FLOPs beside torch's own counter, on a model without storage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.flops import FlopCount, flops_per_token, product_flops_per_token
from ezpz_llm.model.gpt import GPT, CausalProduct
from ezpz_llm.model.head import configure_head


def count_flops(config: ModelConfig) -> FlopCount:
    """What a token costs, checked against the model itself.

    Blocks are all alike, so that a model of one and a model of two tell of any number: a tenth of a second.
    """
    one, two = (counted_flops(replace(config, n_layer=layers)) for layers in (1, 2))
    counted = (one + (config.n_layer - 1) * (two - one)) / config.block_size
    return FlopCount(flops_per_token(config), flops_per_token(config, causal=True), product_flops_per_token(config),
                     counted)


def counted_flops(config: ModelConfig) -> int:
    """Forward and backward of one whole sequence, as torch counts them on the meta device.

    Attention is taken by its definition: fused kernels compute the scores again in the backward pass, which torch
    counts and a model's FLOPs do not.
    """
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    configure_head(model, 0)
    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = True
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()
