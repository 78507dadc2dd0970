"""Floating-point operations of training, counted one way in the whole project (imports no torch)."""

from __future__ import annotations

from ezpz_llm.model.config import ModelConfig, parameter_count


def flops_per_token(config: ModelConfig, block_size: int | None = None, causal: bool = False) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12 L C T (Chowdhery et al. 2022, appendix B).

    N is all parameters, a tied table once; an untied input embedding, which is only looked up, is left out.
    Recomputed activations never count. `causal` halves the attention term: the products that the mask leaves.

    Args:
        block_size: tokens in a sequence, T; the model's longest by default.
    """
    looked_up = 0 if config.tied else config.padded_vocab_size * config.n_embd
    length = config.block_size if block_size is None else block_size
    attention = (6 if causal else 12) * config.n_layer * config.n_embd * length
    return float(6 * (parameter_count(config) - looked_up) + attention)
