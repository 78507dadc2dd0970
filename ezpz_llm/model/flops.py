"""Floating-point operations of training, counted one way in the whole project (imports no torch)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import matrix_parameter_count, parameter_count

TOLERANCE = 1e-6
"""Relative; a count by hand and one by machine differ by rounding alone."""


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of forward and backward per token, by both conventions of attention, and what proves them.

    `model` counts all of the attention's products, as kernels without a mask do and as most published MFUs do;
    `causal` the half that the mask leaves. `products` is the part of `model` that is matrix products, `counted`
    the same by torch's counter on the model itself, None where nobody counted.
    """

    model: float
    causal: float
    products: float
    counted: float | None = None

    @property
    def is_proven(self) -> bool:
        """Whether torch's counter saw as many products as the formula has."""
        return self.counted is not None and abs(self.counted / self.products - 1) < TOLERANCE

    def as_record(self) -> dict[str, float | bool | None]:
        """For run.json."""
        return {**asdict(self), "is_proven": self.is_proven}


def flops_per_token(config: ModelConfig, block_size: int | None = None, causal: bool = False) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12 L C T (Chowdhery et al. 2022, appendix B).

    N is all parameters, a tied table once; an untied input embedding, which is only looked up, is left out.
    Recomputed activations never count. `causal` halves the attention term: the products that the mask leaves.

    Args:
        block_size: tokens in a sequence, T; the model's longest by default.
    """
    looked_up = 0 if config.tied else config.padded_vocab_size * config.n_embd
    return 6.0 * (parameter_count(config) - looked_up) + _attention(config, block_size) / (2 if causal else 1)


def product_flops_per_token(config: ModelConfig, block_size: int | None = None) -> float:
    """The part of `flops_per_token` that is matrix products, which is what counters see.

    Positions, biases and gains are added or multiplied once a token; 6N counts them as if they were matrices.
    """
    return 6.0 * matrix_parameter_count(config) + _attention(config, block_size)


def _attention(config: ModelConfig, block_size: int | None) -> float:
    """Scores and weighted values, in both passes, over the whole sequence: 12 L C T a token."""
    length = config.block_size if block_size is None else block_size
    return 12.0 * config.n_layer * config.n_embd * length
