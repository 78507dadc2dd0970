"""Reference implementation of a training step in plain torch, against which a single process is checked.

The module imports nothing from the model, the engines or the trainer, so that it cannot share their bugs. Weights
are dictionaries of tensors, under the names used in checkpoints. Everything is computed in fp64; `Arithmetic` adds
the rounding of a precision recipe.

Shapes: B sequences, T tokens, C width, H heads, H_kv key/value heads, D = C/H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by parameter name as in checkpoints: "transformer.h.0.attn.c_attn.weight"."""
MicroBatch = tuple[Tensor, Tensor]
"""Tokens and targets, both (B, T). Targets of -100 are ignored."""
IGNORED = -100


@dataclass(frozen=True)
class Settings:
    """Settings of a step that the tensors do not determine.

    The tensors determine the number of layers, widths and biases. They also determine whether positions are learned
    (`wpe`) or rotary, the activation (SwiGLU with `c_gate`, else GELU), the norms of queries and keys, and whether
    the head is tied (no `lm_head`).

    Attributes:
        norm: "layernorm" or "rmsnorm".
        rope_theta: base of the rotary angles, unless positions are learned.
        clip: the largest global gradient norm; 0 disables clipping.
        weight_decay: for matrices and tables; vectors are not decayed.
        z_loss: factor of the squared log-sum-exp, which is added to the gradient but not to the reported loss.
        gelu: "tanh" or "erf".
        norms_after: True if a block normalizes the outputs of attention and MLP instead of their inputs.
        rope_scaling: factor, low, high and context of Llama 3.1's rotary frequencies.
        end_of_text: token at the start of each document; a token attends only to its own document. None: to all.
    """

    n_head: int
    n_kv_head: int
    norm: str
    norm_eps: float
    rope_theta: float
    clip: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    z_loss: float = 0.0
    gelu: str = "tanh"
    norms_after: bool = False
    rope_scaling: tuple[float, float, float, float] = (1.0, 1.0, 4.0, 8192.0)
    end_of_text: int | None = None


@dataclass(frozen=True)
class Arithmetic:
    """Rounding of a precision recipe, and random errors that emulate another summation order.

    Attributes:
        parameters: dtype of parameters in the forward pass, and of their gradients within a micro-batch.
        products: dtype of the inputs and outputs of matmuls, and of elementwise operations on them.
        residual: dtype of the residual stream and of the outputs of norms.
        errors: largest relative error of a result in another summation order, before it is rounded.
        seed: seed of the random errors, which are uniform in [-errors, errors]; None for no errors.
    """

    parameters: torch.dtype
    products: torch.dtype
    residual: torch.dtype
    errors: float = 0.0
    seed: int | None = None

    def reordered(self, seed: int) -> Arithmetic:
        """Return the same arithmetic with another summation order."""
        return replace(self, seed=seed)


EXACT = Arithmetic(torch.float64, torch.float64, torch.float64)
"""Plain fp64."""
ARITHMETIC = {
    # In sums of 64 to 256 terms, with each addition rounded to 2^-24, errors accumulate as a random walk.
    "fp32": Arithmetic(torch.float32, torch.float32, torch.float32, errors=2.0 ** -22),
    # torch.autocast over fp32 parameters. Sums are fp32 and rounded once, to 2^-8. A sum of two rounded halves, or
    # a kernel that rounds at a different point, adds one such rounding.
    "bf16_autocast": Arithmetic(torch.float32, torch.bfloat16, torch.float32, errors=2.0 ** -8),
    # bf16 parameters with fp32 master weights: the residual stream and each micro-batch's gradients are rounded
    # too.
    "bf16": Arithmetic(torch.bfloat16, torch.bfloat16, torch.bfloat16, errors=2.0 ** -8),
}
"""Arithmetic by recipe. In all of them, accumulated gradients, moments, weights and the loss are fp32."""


class _Rounding:
    """Rounding operations of one step, with independent random errors if the arithmetic has a seed."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self._noise = None if arithmetic.seed is None else torch.Generator().manual_seed(arithmetic.seed)

    def parameters(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.arithmetic.parameters, self)

    def product(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.arithmetic.products, self)

    def residual(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.arithmetic.residual, self)

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Round a value to `dtype` and return it in fp64."""
        if self._noise is not None:
            # In recipes with bf16 products, fp32 values have the smaller errors of fp32.
            errors = min(self.arithmetic.errors, 2 * torch.finfo(dtype).eps)
            x = x * (1 + errors * (2 * torch.rand(x.shape, generator=self._noise).double() - 1))
        return x if dtype == torch.float64 else x.to(dtype).double()


class _Rounded(torch.autograd.Function):
    """Rounding of a value in the forward pass and of its gradient in the backward pass, to the same dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, rounding: _Rounding) -> Tensor:
        ctx.dtype, ctx.rounding = dtype, rounding
        return rounding.round(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounding.round(grad, ctx.dtype), None, None


def _linear(x: Tensor, weights: Tensors, name: str, r: _Rounding) -> Tensor:
    y = r.product(x) @ r.product(weights[f"{name}.weight"]).T
    if (bias := weights.get(f"{name}.bias")) is not None:
        y = y + r.product(bias)
    return r.product(y)


def _normalize(x: Tensor, weights: Tensors, name: str, settings: Settings, r: _Rounding) -> Tensor:
    if settings.norm == "layernorm":  # Ba et al. 2016, arXiv:1607.06450
        x = x - x.mean(-1, keepdim=True)
    y = _scale_to_unit(x, settings) * weights[f"{name}.weight"]
    if (bias := weights.get(f"{name}.bias")) is not None:
        y = y + bias
    return r.residual(y)


def _scale_to_unit(x: Tensor, settings: Settings) -> Tensor:
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + settings.norm_eps)


def _normalize_heads(x: Tensor, weights: Tensors, name: str, settings: Settings, r: _Rounding) -> Tensor:
    """Normalize queries or keys (B, H, T, D) by head or over all heads, if the model does (arXiv:2010.04245)."""
    if (gain := weights.get(f"{name}_head_norm.weight")) is not None:
        return r.product(_scale_to_unit(x, settings) * gain)
    if (gain := weights.get(f"{name}_width_norm.weight")) is not None:
        wide = x.transpose(1, 2).flatten(2)
        return r.product(_scale_to_unit(wide, settings) * gain).view(x.transpose(1, 2).shape).transpose(1, 2)
    return x


def _frequency(exponent: float, settings: Settings) -> float:
    """Return theta^-exponent; reduced by `rope_scaling` as in Llama 3.1 (arXiv:2407.21783; apply_scaling)."""
    factor, low, high, context = settings.rope_scaling
    frequency = settings.rope_theta ** -exponent
    turns = context * frequency / (2 * math.pi)
    if turns >= high:
        return frequency
    share = max(0.0, (turns - low) / (high - low))
    return share * frequency + (1 - share) * frequency / factor


def _rotate(x: Tensor, settings: Settings) -> Tensor:
    """Rotate the pair (i, i + D/2) of x (B, H, T, D) at position t by t theta^(-2i/D) (arXiv:2104.09864)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = [_frequency(number / half, settings) for number in range(half)]
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _hidden_tokens(tokens: Tensor, settings: Settings) -> Tensor:
    """Return True (B, 1, T, T) where a query must not attend: to later tokens and to other documents."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(len(tokens), 1, 1)
    if settings.end_of_text is not None:
        for row, at in (tokens == settings.end_of_text).nonzero().tolist():
            hidden[row, at:, :at] = True
    return hidden[:, None]


def _attention(x: Tensor, hidden: Tensor, weights: Tensors, name: str, settings: Settings,
               r: _Rounding) -> Tensor:
    batch, length, _ = x.shape
    heads, kv_heads = settings.n_head, settings.n_kv_head
    parts = _linear(x, weights, f"{name}.c_attn", r).view(batch, length, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    q = _normalize_heads(q, weights, f"{name}.q", settings, r)
    k = _normalize_heads(k, weights, f"{name}.k", settings, r)
    if "transformer.wpe.weight" not in weights:
        q, k = (r.product(_rotate(part, settings)) for part in (q, k))
    # Query head h reads key/value head h H_kv/H (Ainslie et al. 2023, arXiv:2305.13245).
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = r.product(r.product(q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]))
    probabilities = r.product(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1))
    mixed = r.product(probabilities @ v).transpose(1, 2).flatten(2)
    return _linear(mixed, weights, f"{name}.c_proj", r)


def _mlp(x: Tensor, weights: Tensors, name: str, settings: Settings, r: _Rounding) -> Tensor:
    hidden = _linear(x, weights, f"{name}.c_fc", r)
    if f"{name}.c_gate.weight" in weights:  # Shazeer 2020, arXiv:2002.05202
        gate = _linear(x, weights, f"{name}.c_gate", r)
        hidden = r.product(r.product(gate * torch.sigmoid(gate)) * hidden)
    elif settings.gelu == "erf":  # Hendrycks and Gimpel 2016, arXiv:1606.08415, as is the tanh form
        hidden = r.product(hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)
    else:
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden ** 3)
        hidden = r.product(hidden * (1 + torch.tanh(inner)) / 2)
    return _linear(hidden, weights, f"{name}.c_proj", r)


def _logits(weights: Tensors, tokens: Tensor, settings: Settings, r: _Rounding) -> Tensor:
    """Compute logits (B, T, V) from tokens (B, T)."""
    weights = {name: r.parameters(value.double()) for name, value in weights.items()}
    x, hidden = weights["transformer.wte.weight"][tokens], _hidden_tokens(tokens, settings)
    if "transformer.wpe.weight" in weights:
        x = r.residual(x + weights["transformer.wpe.weight"][:tokens.shape[1]])
    for layer in range(len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")})):
        block = f"transformer.h.{layer}"
        if settings.norms_after:
            y = _attention(x, hidden, weights, f"{block}.attn", settings, r)
            x = r.residual(x + _normalize(y, weights, f"{block}.ln_1", settings, r))
            y = _mlp(x, weights, f"{block}.mlp", settings, r)
            x = r.residual(x + _normalize(y, weights, f"{block}.ln_2", settings, r))
            continue
        y = _normalize(x, weights, f"{block}.ln_1", settings, r)
        x = r.residual(x + _attention(y, hidden, weights, f"{block}.attn", settings, r))
        y = _normalize(x, weights, f"{block}.ln_2", settings, r)
        x = r.residual(x + _mlp(y, weights, f"{block}.mlp", settings, r))
    x = _normalize(x, weights, "transformer.ln_f", settings, r)
    head = weights.get("lm_head.weight", weights["transformer.wte.weight"])
    return r.product(r.product(x) @ r.product(head).T)


def _losses(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the mean negative log-likelihood over targets that are not ignored, without and with the z-loss."""
    counts = targets != IGNORED
    normalizer = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, targets.where(counts, 0)[..., None])[..., 0]
    loss = ((normalizer - chosen) * counts).sum() / counts.sum()
    return loss, loss + z_loss * (normalizer.square() * counts).sum() / counts.sum()


def gradients(weights: Tensors, micro_batches: Sequence[MicroBatch], settings: Settings,
              arithmetic: Arithmetic = EXACT) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step (the mean of its micro-batches' mean losses) and its gradients, in fp64."""
    rounding = _Rounding(arithmetic)
    leaves = {name: value.detach().double().clone().requires_grad_() for name, value in weights.items()}
    total = 0.0
    for tokens, targets in micro_batches:
        loss, differentiated = _losses(_logits(leaves, tokens, settings, rounding), targets, settings.z_loss)
        (differentiated / len(micro_batches)).backward()
        total += loss.item() / len(micro_batches)
    return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def evaluation_loss(weights: Tensors, batches: Sequence[MicroBatch], settings: Settings,
                    arithmetic: Arithmetic = EXACT) -> float:
    """Return the loss of an evaluation: the mean over all targets of all batches, except ignored targets."""
    rounding = _Rounding(arithmetic)
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets in batches:
            number = int((targets != IGNORED).sum())
            total += _losses(_logits(weights, tokens, settings, rounding), targets, 0.0)[0].item() * number
            count += number
    return total / count


def global_norm(tensors: Tensors) -> float:
    """Return the 2-norm of all tensors, as one vector."""
    return math.sqrt(sum(value.double().square().sum().item() for value in tensors.values()))


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor by which clipping scales gradients, at most 1 (Pascanu et al. 2013, arXiv:1211.5063)."""
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


@dataclass(frozen=True)
class State:
    """Weights, AdamW moments and the number of optimizer steps taken.

    AdamW is algorithm 2 of Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    weights: Tensors
    first: Tensors
    second: Tensors
    step: int

    def to(self, dtype: torch.dtype) -> State:
        """Convert the tensors to another dtype."""
        weights, first, second = ({name: value.to(dtype) for name, value in each.items()}
                                  for each in (self.weights, self.first, self.second))
        return State(weights, first, second, self.step)


def initial_state(weights: Tensors) -> State:
    """Return the state before the first step."""
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    return State(weights, zeros, zeros, 0)


def update_moments(state: State, clipped: Tensors, settings: Settings) -> State:
    """Return the state with moments updated by clipped gradients, and unchanged weights."""
    beta1, beta2 = settings.betas
    return replace(
        state, step=state.step + 1,
        first={name: beta1 * old + (1 - beta1) * clipped[name] for name, old in state.first.items()},
        second={name: beta2 * old + (1 - beta2) * clipped[name].square() for name, old in state.second.items()})


def update_weights(state: State, rate: float, settings: Settings) -> State:
    """Return the state with weights updated by its moments, which must already include this step's gradients."""
    beta1, beta2 = settings.betas
    weights = {}
    for name, weight in state.weights.items():
        decay = settings.weight_decay if weight.dim() >= 2 else 0.0
        first = state.first[name] / (1 - beta1 ** state.step)
        second = state.second[name] / (1 - beta2 ** state.step)
        weights[name] = weight * (1 - rate * decay) - rate * first / (second.sqrt() + settings.eps)
    return replace(state, weights=weights)


def apply_adamw(state: State, clipped: Tensors, rate: float, settings: Settings) -> State:
    """Return the state after an optimizer step with clipped gradients."""
    return update_weights(update_moments(state, clipped, settings), rate, settings)


def cosine_rate(step: int, peak: float, floor: float, warmup: int, decay: int) -> float:
    """Return the learning rate of a step, counted from 0.

    Rises linearly to the peak in `warmup` steps, then falls along half a cosine to the floor at step `decay`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / (decay - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2


def train_step(state: State, micro_batches: Sequence[MicroBatch], rate: float, settings: Settings,
               arithmetic: Arithmetic = EXACT) -> tuple[float, float, State]:
    """Take a step; return the loss, the gradient norm before clipping, and the state after the step (fp64)."""
    loss, raw = gradients(state.weights, micro_batches, settings, arithmetic)
    norm = global_norm(raw)
    factor = clip_factor(norm, settings.clip)
    return loss, norm, apply_adamw(state.to(torch.float64), {name: value * factor for name, value in raw.items()},
                                   rate, settings)

