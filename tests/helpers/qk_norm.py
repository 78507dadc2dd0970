"""QK norm (Henry et al. 2020, arXiv:2010.04245) added from outside the package: two modules, two table rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from ezpz_llm.training.model import gpt
from ezpz_llm.training.model.config import BLOCK, ModelConfig, Parameter, TpRule, add_to_block

ROWS = tuple(Parameter(f"attn.{name}.weight", ("D",), "ones", "summed") for name in ("q_norm", "k_norm"))


class QKNormAttention(gpt.Attention):
    """Attention with queries and keys normalized over a head's dimensions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=config.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rotation: gpt.Rotation | None) -> Tensor:
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim))
        kv_heads = heads.shape[2] // (self.queries_per_kv + 2)
        q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = gpt.rotate(q, rotation), gpt.rotate(k, rotation)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.drop(self.c_proj(self.product(q, k, v).transpose(1, 2).flatten(2)))


@contextmanager
def qk_norm(tp: TpRule | None = "summed", in_table: bool = True) -> Iterator[None]:
    """Build every GPT in this context with QK norm, under the given tensor-parallel rule."""
    plain, known = gpt.Attention, list(BLOCK)
    gpt.Attention = QKNormAttention
    if in_table:
        add_to_block(*(replace(row, tp=tp) for row in ROWS))
    try:
        yield
    finally:
        gpt.Attention = plain
        BLOCK[:] = known
