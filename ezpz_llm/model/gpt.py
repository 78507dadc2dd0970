"""One GPT for GPT-2 and Llama shapes, with the module names of Hugging Face's GPT-2.

Shapes: B sequences, T tokens, C width, H heads, H_kv key/value heads, D = C/H dimensions of a head,
V padded vocabulary.

The model is plain: it knows no ranks, no precision and no engine. Those are applied from outside, by replacing
modules named in a table or by autocast. Hence three habits: a module uses only its own parameters (engines gather
them by hooks on its forward), sizes of sharded dimensions are read from the tensors and not from the
configuration, and the product of queries and keys is a module, as is the head, whose loss never has all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ezpz_llm.base.errors import UserError
from ezpz_llm.model.attention_kernels import blockwise_attention, is_blockwise
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.embedding import TiedEmbedding
from ezpz_llm.model.loss import Head, Reduction

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (T, D/2) in fp32."""


def rotation_tables(length: int, head_dim: int, theta: float, device: torch.device, first: int = 0) -> Rotation:
    """The angles t * theta^(-2i/D) of rotary positions t from `first` on (Su et al. 2021, arXiv:2104.09864).

    Computed on each forward pass, in fp32: as buffers they would be rounded by a model-wide change of dtype and
    lost on the way from a meta device.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(first, first + length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (i, i + D/2) of (B, H, T, D) by its angle; fp32 inside, the input's dtype outside."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def make_norm(config: ModelConfig) -> nn.Module:
    """The normalisation of one C-wide activation."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class CausalProduct(nn.Module):
    """Scaled dot products of whole sequences, the part of attention that has no parameters.

    `explicit`: by the definition, with all scores in memory, where torch would choose among its kernels, or we
    would take ours.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.explicit = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, H, T, D), keys and values (B, H_kv, T, D) to (B, H, T, D)."""
        dropout = self.dropout if self.training else 0.0
        if is_blockwise(q.device, q.dtype, dropout) and not self.explicit:
            return blockwise_attention(q, k, v)
        with sdpa_kernel(SDPBackend.MATH) if self.explicit else nullcontext():
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout,
                                                           enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention; `c_attn` holds queries, keys and values as parts (C, C_kv, C_kv) of its rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.n_head // config.n_kv_head
        self.product = CausalProduct(config.dropout)
        self.c_attn = nn.Linear(config.n_embd, config.n_embd + 2 * config.kv_width, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H + 2 H_kv, T, D)
        kv_heads = heads.shape[1] // (self.queries_per_kv + 2)
        q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.drop(self.c_proj(self.product(q, k, v).transpose(1, 2).flatten(2)))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Compiled for CPU the sigmoid is several times as fast as the tanh, which is 2 sigmoid(2z) - 1.
    """
    if not (torch.compiler.is_compiling() and x.device.type == "cpu"):
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide ** 3))).to(x.dtype)


class MLP(nn.Module):
    """C to the intermediate width and back, through GELU (tanh form) or, with `c_gate`, SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.c_gate = (nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
                       if config.mlp == "swiglu" else None)
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.c_gate is None:
            hidden = gelu(self.c_fc(x))
        else:
            hidden = functional.silu(self.c_gate(x)) * self.c_fc(x)
        return self.drop(self.c_proj(hidden))


class Block(nn.Module):
    """One pre-norm layer, (B, T, C) to (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tokens to logits, or to the loss. A new model holds torch's default values: see `init_weights`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({"wte": TiedEmbedding(config.padded_vocab_size, config.n_embd)})
        if config.position == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["drop"] = nn.Dropout(config.dropout)
        self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer["ln_f"] = make_norm(config)
        self.lm_head = Head(config.n_embd, config.padded_vocab_size)
        self._tie()

    def _tie(self) -> None:
        if self.config.tied:
            self.transformer["wte"].tied = True
            self.lm_head.weight = self.transformer["wte"].weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        # Behind every .to(): a move from the meta device makes new parameters, module by module.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                first: int = 0, last_only: bool = False) -> Tensor:
        """Tokens (B, T) to logits (B, T, V), or with targets (B, T) to the loss, 0-d in fp32.

        Targets of -100 are ignored.

        Args:
            first: the position of the first token, where the sequence is part of a longer one.
            last_only: logits of the last token only, (B, 1, V).

        Raises:
            UserError: when the sequence exceeds the model's block size.
        """
        x = embed(self.config, self.transformer, tokens, first)
        rotation = rotation_of(self.config, tokens.shape[1], tokens.device, first)
        for block in self.transformer["h"]:
            x = block(x, rotation)
        x = self.transformer["ln_f"](x[:, -1:] if last_only else x)
        return self.lm_head(x, targets, reduction)


def embed(config: ModelConfig, parts: nn.ModuleDict, tokens: Tensor, first: int = 0) -> Tensor:
    """Tokens (B, T) to activations (B, T, C), by the embeddings and the dropout among a model's parts.

    Raises:
        UserError: when the sequence exceeds the model's block size.
    """
    length = first + tokens.shape[1]
    if length > config.block_size:
        raise UserError(f"a sequence of {length} tokens exceeds the model's context of {config.block_size}",
                        instead=f"at most {config.block_size} tokens, or a model with a larger block_size")
    x = parts["wte"](tokens)
    if config.position == "learned":
        x = x + parts["wpe"](torch.arange(first, length, device=tokens.device))
    return parts["drop"](x)


def rotation_of(config: ModelConfig, length: int, device: torch.device, first: int = 0) -> Rotation | None:
    """The rotation of `length` positions from `first` on, None where positions are learned."""
    if config.position == "learned":
        return None
    return rotation_tables(length, config.head_dim, config.rope_theta, device, first)
