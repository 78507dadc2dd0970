"""One GPT for GPT-2 and Llama shapes, with the module names of Hugging Face's GPT-2.

Shapes: B sequences, T tokens, C width, H heads, H_kv key/value heads, D = C/H dimensions of a head,
V padded vocabulary.

The model is plain: it knows no ranks, no precision and no engine. Those are applied from outside, by replacing
modules named in a table or by autocast. Hence three habits: a module uses only its own parameters (whoever gathers
parameters can hook its forward), sizes of sharded dimensions are read from the tensors and not from the
configuration, and the loss is a module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.loss import CrossEntropy, Reduction

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (T, D/2) in fp32."""


def rotation_tables(length: int, head_dim: int, theta: float, device: torch.device) -> Rotation:
    """The angles t * theta^(-2i/D) of rotary positions (Su et al. 2021, arXiv:2104.09864).

    Computed on each forward pass, in fp32: as buffers they would be rounded by a model-wide change of dtype and
    lost on the way from a meta device.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
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


class Attention(nn.Module):
    """Causal self-attention; `c_attn` holds queries, keys and values as parts (C, C_kv, C_kv) of its rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.n_head // config.n_kv_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, config.n_embd + 2 * config.kv_width, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H + 2 H_kv, T, D)
        kv_heads = heads.shape[1] // (self.queries_per_kv + 2)
        q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = functional.scaled_dot_product_attention(  # (B, H, T, D)
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.queries_per_kv > 1)
        return self.drop(self.c_proj(y.transpose(1, 2).flatten(2)))


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
            hidden = functional.gelu(self.c_fc(x), approximate="tanh")
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
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)})
        if config.position == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["drop"] = nn.Dropout(config.dropout)
        self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer["ln_f"] = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.loss = CrossEntropy()
        self._tie()

    def _tie(self) -> None:
        if self.config.tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        # Behind every .to(): a move from the meta device makes new parameters, module by module.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Tokens (B, T) to logits (B, T, V), or with targets (B, T) to the loss, 0-d in fp32.

        Targets of -100 are ignored.

        Raises:
            UserError: when T exceeds the model's block size.
        """
        x, rotation = self.embed(tokens)
        for block in self.transformer["h"]:
            x = block(x, rotation)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits if targets is None else self.loss(logits, targets, reduction)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Rotation | None]:
        """What the first block receives: activations (B, T, C), and the rotation where positions are rotary."""
        config, length = self.config, tokens.shape[1]
        if length > config.block_size:
            raise UserError(f"a sequence of {length} tokens exceeds the model's context of {config.block_size}",
                            instead=f"at most {config.block_size} tokens, or a model with a larger block_size")
        x, rotation = self.transformer["wte"](tokens), None
        if config.position == "learned":
            x = x + self.transformer["wpe"](torch.arange(length, device=tokens.device))
        else:
            rotation = rotation_tables(length, config.head_dim, config.rope_theta, tokens.device)
        return self.transformer["drop"](x), rotation
