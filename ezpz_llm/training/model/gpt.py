"""GPT model for GPT-2 and Llama shapes, with the module names of Hugging Face's GPT-2.

Shapes: B sequences, T tokens, C width, H heads, H_kv key/value heads, D head dimension, V padded vocabulary size;
C_q = H D is the width of all queries, and C_kv = H_kv D the width of all keys or values.

The model is independent of ranks, precision and engines. Other modules adapt it by autocast, or by replacing
submodules according to the table in parameters.py. They rely on three conventions:

1. A module uses only its own parameters, since engines gather them by hooks on its forward.
2. Sizes of sharded dimensions are read from tensors, not from the configuration.
3. The part of attention without parameters is a module, and so is the head, which computes the loss without
   materializing all logits.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import MovableModule
from ezpz_llm.training.model.attention_kernels import is_blockwise
from ezpz_llm.training.model.blockwise_attention import blockwise_attention
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.document_mask import loss_mask
from ezpz_llm.training.model.embedding import TiedEmbedding
from ezpz_llm.training.model.loss import Head, Reduction

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (T, D/2) in fp32."""


def rotation_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the rotary frequencies theta^(-2i/D) (Su et al. 2021, arXiv:2104.09864), (D/2,) in fp32.

    `rope_factor` applies the rule of Llama 3.1 (github.com/meta-llama/llama-models, apply_scaling in model.py):
    frequencies of fewer than `rope_low` turns within `rope_context` are divided by the factor, frequencies of more
    than `rope_high` turns are unchanged, and in between the two are interpolated linearly in the number of turns.
    """
    frequencies = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim)
    if config.rope_factor == 1:
        return frequencies
    turns = config.rope_context * frequencies / (2 * math.pi)
    share = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return share * frequencies + (1 - share) * frequencies / config.rope_factor


def rotation_tables(length: int, frequencies: Tensor, first: int = 0) -> Rotation:
    """Return the rotations of `length` positions starting at `first`.

    They are computed in fp32 in each forward pass, because buffers would be rounded when the model's dtype changes,
    and lost when the model leaves the meta device.
    """
    device = frequencies.device
    angles = torch.arange(first, first + length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (i, i + D/2) of (B, T, H, D) by its angle; computes in fp32, returns the input's dtype."""
    cos, sin = (part[:, None] for part in rotation)
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, cos, sin)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class _Rotate(torch.autograd.Function):
    """`rotate` in eager mode, without an fp32 copy of x.

    It takes a third of the memory traffic, and saves only the angles.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated (B, T, H, D)."""
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient back."""
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grad, cos, -sin), None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result = torch.empty_like(x)
    (first, second), (rotated_first, rotated_second) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.addcmul(first * cos, second, sin, value=-1, out=rotated_first)
    torch.addcmul(second * cos, first, sin, out=rotated_second)
    return result


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, computed in fp32 on CPU for any parameter dtype.

    torch 2.13 sums the gradients of gain and bias in bf16 on CPU, with an error of 32 % after 4,096 tokens.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (…, C). On CPU, convert to fp32 first if the weight has another dtype."""
        if x.device.type != "cpu" or self.weight.dtype == torch.float32:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        wide = functional.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps)
        return wide.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in fp32 on CPU for any parameter dtype.

    On CPU, torch would round to the parameter dtype after each operation.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (…, C). On CPU, convert to fp32 first if the weight has another dtype."""
        if x.device.type != "cpu" or self.weight.dtype == torch.float32:
            return super().forward(x)
        return functional.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """Create the normalization layer of a C-wide activation."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class CausalProduct(nn.Module):
    """Causal scaled dot-product attention, the part of attention without parameters.

    Attributes:
        explicit: True to use torch's math backend, which computes and stores all scores, instead of a fused or the
            blockwise kernel.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.explicit = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention of queries (B, H, T, D), keys and values (B, H_kv, T, D); returns (B, H, T, D).

        Args:
            mask: added to the scores, (B, 1, T, T); -inf for later tokens.
        """
        dropout = self.dropout if self.training else 0.0
        if not self.explicit and is_blockwise(q.device, q.dtype, dropout, mask is not None):
            return blockwise_attention(q, k, v, mask)
        if mask is not None and q.shape[1] != k.shape[1]:
            # torch's memory-efficient kernel supports masks, but not grouped heads.
            k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        with sdpa_kernel(SDPBackend.MATH) if self.explicit else nullcontext():
            return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, dropout_p=dropout,
                                                           enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention; rows of `c_attn` are queries, keys and values (C_q, C_kv, C_kv)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.n_head // config.n_kv_head
        self.product = CausalProduct(config.dropout)
        self.c_attn = nn.Linear(config.n_embd, config.q_width + 2 * config.kv_width, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm == "head":
            self.q_head_norm, self.k_head_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        elif config.qk_norm == "width":
            self.q_width_norm = RMSNorm(config.q_width, config.norm_eps)
            self.k_width_norm = RMSNorm(config.kv_width, config.norm_eps)
        self.c_proj = nn.Linear(config.q_width, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None, *mask: Tensor) -> Tensor:
        """Compute attention of (B, T, C); returns (B, T, C).

        Args:
            rotation: None with learned positions.
            mask: document mask, if any (`document_mask.py`).
        """
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 H_kv, D)
        kv_heads = heads.shape[2] // (self.queries_per_kv + 2)
        q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2)
        if self.qk_norm == "head":
            q, k = _normalize(self.q_head_norm, q), _normalize(self.k_head_norm, k)
        elif self.qk_norm == "width":
            q, k = _normalize_width(self.q_width_norm, q), _normalize_width(self.k_width_norm, k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        # Transpose last: kernels keep this layout, so that neither their outputs nor their gradients are copied.
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.drop(self.c_proj(self.product(q, k, v, *mask).transpose(1, 2).flatten(2)))


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize queries or keys in the dtype of the gain, which is fp32 under autocast."""
    return norm(x.to(norm.weight.dtype)).type_as(x)


def _normalize_width(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize over all heads of a token, (B, T, H, D)."""
    return _normalize(norm, x.flatten(2)).unflatten(-1, x.shape[2:])


def gelu(x: Tensor) -> Tensor:
    """Apply GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Compiled code on CPU uses tanh(z) = 2 sigmoid(2z) - 1, since its sigmoid is several times as fast as its tanh.
    """
    if not (torch.compiler.is_compiling() and x.device.type == "cpu"):
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide ** 3))).to(x.dtype)


class MLP(nn.Module):
    """MLP of two linear layers with GELU (tanh form or exact), or of three with SwiGLU (`c_gate` is the third)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.c_gate = (nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
                       if config.mlp == "swiglu" else None)
        self.activation = functional.gelu if config.mlp == "gelu_erf" else gelu
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of (B, T, C)."""
        if self.c_gate is None:
            hidden = self.activation(self.c_fc(x))
        else:
            hidden = functional.silu(self.c_gate(x)) * self.c_fc(x)
        return self.drop(self.c_proj(hidden))


class Block(nn.Module):
    """Transformer block, (B, T, C) to (B, T, C).

    Attributes:
        checkpointing: options of torch's `checkpoint` if activations are recomputed in the backward pass
            (`recomputation.py`); None to keep them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.norms_after = config.norm_order == "after"
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, x: Tensor, rotation: Rotation | None = None, *mask: Tensor) -> Tensor:
        """Compute the block, with activation checkpointing if requested; arguments as in `Attention`."""
        if self.checkpointing is None:
            return self._layers(x, rotation, *mask)
        # Pass checkpoint() a method, not a closure over the block: torch 2.6 guards closures by identity and would
        # compile a graph for each block.
        return checkpoint(self._layers, x, rotation, *mask, use_reentrant=False, **self.checkpointing)

    def _layers(self, x: Tensor, rotation: Rotation | None, *mask: Tensor) -> Tensor:
        if self.norms_after:
            x = x + self.ln_1(self.attn(x, rotation, *mask).type_as(x))
            return x + self.ln_2(self.mlp(x).type_as(x))
        x = x + self.attn(self.ln_1(x), rotation, *mask)
        return x + self.mlp(self.ln_2(x))


class GPT(MovableModule):
    """GPT model that returns logits or the loss. A new model has torch's default weights; see `init_weights`.

    Attributes:
        end_of_text: token at the start of each document, if losses mask other documents (`mask_documents`).
    """

    end_of_text: int | None = None

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

    def after_move(self) -> None:
        """Tie the head to the embedding again; a move from the meta device creates new parameters."""
        self._tie()

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                first: int = 0, last_only: bool = False, sequences: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of tokens (B, T), or with targets (B, T) the loss in fp32.

        The loss is 0-d, or (B,) with the reduction "rows". Targets of -100 are ignored.

        Args:
            first: position of the first token, if the sequence is part of a longer one.
            last_only: return logits of the last token only, (B, 1, V).
            sequences: the longer sequences, for the document mask.

        Raises:
            UserError: the sequence exceeds the model's block size.
        """
        x = embed(self.config, self.transformer, tokens, first)
        rotation = rotation_of(self.config, tokens.shape[1], tokens.device, first)
        whole = tokens if sequences is None else sequences
        mask = loss_mask(self.end_of_text, None if targets is None else whole, x)
        for block in self.transformer["h"]:
            x = block(x, rotation, *mask)
        x = self.transformer["ln_f"](x[:, -1:] if last_only else x)
        return self.lm_head(x, targets, reduction)


def embed(config: ModelConfig, parts: nn.ModuleDict, tokens: Tensor, first: int = 0) -> Tensor:
    """Embed tokens (B, T) as activations (B, T, C), with the embeddings and the dropout in `parts`.

    Raises:
        UserError: the sequence exceeds the model's block size.
    """
    length = first + tokens.shape[1]
    if length > config.block_size:
        raise UserError(f"a sequence of {length} tokens exceeds the model's context of {config.block_size}",
                        instead=f"pass at most {config.block_size} tokens, or use a model with a larger block_size")
    x = parts["wte"](tokens)
    if config.position == "learned":
        x = x + parts["wpe"](torch.arange(first, length, device=tokens.device))
    return parts["drop"](x)


def rotation_of(config: ModelConfig, length: int, device: torch.device, first: int = 0) -> Rotation | None:
    """Return the rotation of `length` positions starting at `first`; None for learned positions."""
    if config.position == "learned":
        return None
    return rotation_tables(length, rotation_frequencies(config, device), first)
