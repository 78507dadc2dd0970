"""Model configuration, the table of a model's parameters, and the named models (imports no torch).

A new part of a block is an option and its parameters here, and its computation in gpt.py.

Symbols: C width, D head dimension, H heads, L layers, T context length, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ezpz_llm.core.base import MAX_IDS, UserError, shorten_value, unknown_name_error

Norm = Literal["layernorm", "rmsnorm"]
Position = Literal["learned", "rope"]
Mlp = Literal["gelu", "gelu_erf", "swiglu"]
QKNorm = Literal["none", "head", "width"]
NormOrder = Literal["before", "after"]
Init = Literal["gpt2", "llama"]
RotaryPairing = Literal["half"]
QkvOrder = Literal["q, k, v"]
Recompute = int | Literal["selective"]
"""Recomputation in the backward pass: every N-th block, 0 for none, or parts of all blocks."""

_CHOICES = {"norm": get_args(Norm), "position": get_args(Position), "mlp": get_args(Mlp),
            "init": get_args(Init), "qk_norm": get_args(QKNorm), "norm_order": get_args(NormOrder),
            "rotary_pairing": get_args(RotaryPairing), "qkv_order": get_args(QkvOrder)}
_COUNTS = {"n_layer": 10_000, "n_head": 65_536, "n_kv_head": 65_536, "n_embd": 2**20, "head_dim": 2**20,
           "block_size": 2**24, "rope_context": 2**24,
           "vocab_size": MAX_IDS, "vocab_multiple": 2**20, "intermediate_size": 2**24}
"""Positive integer fields and their maxima, chosen so that --check takes at most a second."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only transformer.

    n_kv_head, head_dim and intermediate_size default to 0, which derives them from other fields.

    Raises:
        UserError: a value is invalid, or values are inconsistent.
    """

    n_layer: int
    """Number of transformer blocks, L."""
    n_head: int
    """Number of attention heads, H. C must be a multiple of H unless `head_dim` is given."""
    n_embd: int
    """Width, C."""
    block_size: int
    """Maximum context length, T."""
    vocab_size: int
    """Vocabulary size of the tokenizer. Ids from `vocab_size` to `padded_vocab_size` - 1 are padding and
    never occur in data."""
    n_kv_head: int = 0
    """Number of key/value heads (grouped-query attention); H must be a multiple of it. 0: H."""
    head_dim: int = 0
    """Head dimension, D. 0: C/H."""
    intermediate_size: int = 0
    """Width inside the MLP. 0: 4 C for GELU; for swiglu 8/3 C, rounded up to a multiple of 128."""
    vocab_multiple: int = 128
    """Pad the embedding's rows to a multiple of this, for faster matmuls and divisibility by parallel degrees."""
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    position: Position = "learned"
    rope_theta: float = 500000.0
    """Base of the rotary angles; unused with learned positions."""
    rope_factor: float = 1.0
    """Factor by which low frequencies are reduced, to extend a model trained with a context of `rope_context`, by
    Llama 3.1's rule; see `ezpz_llm.training.model.gpt.rotation_frequencies`. 1: unchanged."""
    rope_low: float = 1.0
    """Turns within `rope_context` below which a frequency is reduced by the full factor."""
    rope_high: float = 4.0
    """Turns within `rope_context` from which a frequency is unchanged; in between, the rule interpolates."""
    rope_context: int = 8192
    rotary_pairing: RotaryPairing = "half"
    """Dimensions of a head that rotate together: "half" for i and i + D/2. Like `qkv_order`, it has one value, and
    is recorded in checkpoints because no shape shows it."""
    qkv_order: QkvOrder = "q, k, v"
    """Rows of the fused projection: the heads of all queries, then of all keys, then of all values."""
    window: int = 0
    """Sliding window of attention in tokens, including the token itself (Mistral); 0: unlimited. The context must
    not be longer than the window, which then has no effect."""
    qk_norm: QKNorm = "none"
    """RMSNorm of queries and keys before rotation (Henry et al. 2020, arXiv:2010.04245): of each "head" (Qwen3), or
    over the "width" of all heads (OLMo 2)."""
    norm_order: NormOrder = "before"
    """Position of a block's norms: "before" attention and MLP, or "after" them, before the sum (OLMo 2)."""
    mlp: Mlp = "gelu"
    """Activation of the MLP: "gelu" (tanh form, GPT-2), "gelu_erf" (exact, nanoGPT) or "swiglu"."""
    bias: bool = True
    """Use biases in linear layers and LayerNorm. RMSNorm and the output head never have a bias."""
    dropout: float = 0.0
    tied: bool = True
    """Share the weight of the token embedding with the output head."""
    init: Init = "gpt2"
    """Initialization scheme; see init.py."""

    def __post_init__(self) -> None:
        if self.n_kv_head == 0:
            object.__setattr__(self, "n_kv_head", self.n_head)
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self._default_head_dim())
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", _intermediate_size(self.mlp, self.n_embd))
        for name, maximum in _COUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is {shorten_value(value)}: it must be an integer of at least 1",
                                where="model")
            if value > maximum:
                raise UserError(f"{name} is {shorten_value(value)}: it must be at most {maximum:,}", where="model")
        for name, choices in _CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise unknown_name_error(f"{name} of a model", str(getattr(self, name)), choices, where="model")
        for name in ("dropout", "norm_eps", "rope_theta", "rope_factor", "rope_low", "rope_high"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1e12:
                raise UserError(f"{name} is {shorten_value(value)}: it must be a number from 0 to 1e12",
                                where="model")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}: it must be in [0, 1)", where="model")
        if self.rope_factor < 1 or self.rope_low >= self.rope_high:
            raise UserError(f"rope_factor is {self.rope_factor:g}, rope_low {self.rope_low:g}, rope_high "
                            f"{self.rope_high:g}: rope_factor must be at least 1, and rope_low less than rope_high",
                            where="model")
        self._check_window()
        if self.n_head % self.n_kv_head:
            raise UserError(f"{self.n_head} heads are not a multiple of {self.n_kv_head} key/value heads",
                            where="model", instead=f"set n_kv_head to one of {_divisors(self.n_head)}")
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(f"rotary positions need an even head dimension, but a head has {self.head_dim} "
                            "dimensions", where="model", instead="use an even n_embd/n_head or an even head_dim")

    def _default_head_dim(self) -> int:
        if not all(type(count := getattr(self, name)) is int and 0 < count <= _COUNTS[name]
                   for name in ("n_embd", "n_head")):
            return 0  # the checks that follow report the invalid value
        if self.n_embd % self.n_head:
            raise UserError(f"width {self.n_embd} is not a multiple of {self.n_head} heads", where="model",
                            instead=f"set n_embd {self.n_head * max(1, round(self.n_embd / self.n_head))}, "
                                    f"or n_head to one of {_divisors(self.n_embd)}")
        return self.n_embd // self.n_head

    def _check_window(self) -> None:
        if type(self.window) is not int or self.window < 0:
            raise UserError(f"window is {shorten_value(self.window)}: it must be an integer of at least 0",
                            where="model")
        if self.window and self.block_size > self.window:
            raise UserError(f"a context of {self.block_size} tokens is longer than the model's attention window of "
                            f"{self.window} tokens", where="model",
                            instead=f"set block_size to {self.window} or less")

    @property
    def q_width(self) -> int:
        """Width of all queries, C_q = H D."""
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys (or values), C_kv."""
        return self.n_kv_head * self.head_dim

    @property
    def normalized_width(self) -> int:
        """Width of the activations that norms within attention keep for the backward pass."""
        return 0 if self.qk_norm == "none" else self.q_width + self.kv_width

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and width of the logits, V."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def differing_settings(model: ModelConfig, other: ModelConfig, ignored: Collection[str] = ()) -> list[str]:
    """Return the names of all settings that differ between two models, except those in `ignored`."""
    return [field.name for field in fields(ModelConfig)
            if field.name not in ignored and getattr(model, field.name) != getattr(other, field.name)]


def _intermediate_size(mlp: str, n_embd: int) -> int:
    # Shazeer 2020 (arXiv:2002.05202): three matrices of 8/3 C cost as much as two of 4 C.
    return -(-8 * n_embd // (3 * 128)) * 128 if mlp == "swiglu" else 4 * n_embd


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


TABLE, HEAD, _POSITIONS = "transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"
"""Names of the token embedding, the untied output head, and the embedding of learned positions."""

Initial = Literal["zeros", "ones", "embedding", "linear", "residual"]
"""Rules for initial weights; the last three are normal distributions (see `initial_std` in
`ezpz_llm.training.model.init`)."""
TpRule = Literal["column", "row", "vocabulary", "head", "replicated", "summed"]
"""Tensor-parallel rules of a parameter. "column": sharded by outputs, each part of its rows separately. "row":
sharded by inputs; the layer's outputs are summed. "vocabulary", "head": sharded by vocabulary rows. "replicated":
replicated and used on whole activations, so that every rank computes the same gradient. "summed": replicated but
used on this rank's heads or hidden units, so that gradients are summed over the tensor-parallel ranks."""

_DIMENSIONS: dict[str, Callable[[ModelConfig], int]] = {
    "C": lambda model: model.n_embd, "C_q": lambda model: model.q_width, "C_kv": lambda model: model.kv_width,
    "D": lambda model: model.head_dim, "F": lambda model: model.intermediate_size,
    "T": lambda model: model.block_size, "V": lambda model: model.padded_vocab_size}
"""Symbols of a shape: model width, total width of the queries, total width of the keys (and of the values), head
dimension, MLP width, context length, padded vocabulary size."""

_CONDITIONS: dict[str, Callable[[ModelConfig], bool]] = {
    "always": lambda model: True, "bias": lambda model: model.bias,
    "bias, layernorm": lambda model: model.bias and model.norm == "layernorm",
    "swiglu": lambda model: model.mlp == "swiglu",
    "swiglu, bias": lambda model: model.mlp == "swiglu" and model.bias,
    "qk_norm head": lambda model: model.qk_norm == "head", "qk_norm width": lambda model: model.qk_norm == "width",
    "learned positions": lambda model: model.position == "learned", "untied": lambda model: not model.tied}
"""Conditions under which a model has a parameter."""


@dataclass(frozen=True)
class Parameter:
    """Row of the table: a parameter of a block (with its name in the block) or of the model.

    Attributes:
        shape: for each dimension, a sum of `_DIMENSIONS`, whose terms are consecutive parts of the parameter
            ("C_q + C_kv + C_kv" for queries, keys, values).
        tp: tensor-parallel rule; None if unknown. A model with such a parameter does not support tensor
            parallelism.
        is_matmul: True for a weight matrix of a matmul with each token's activations: 2 FLOPs per element in the
            forward pass and 4 in the backward pass.
        when: key of `_CONDITIONS`.
    """

    name: str
    shape: tuple[str, ...]
    initial: Initial
    tp: TpRule | None = None
    is_matmul: bool = False
    when: str = "always"

    def exists_in(self, config: ModelConfig) -> bool:
        """Return True if a model has the parameter."""
        return _CONDITIONS[self.when](config)

    @property
    def is_sharded(self) -> bool:
        """True if tensor parallelism shards the parameter."""
        return self.tp in ("column", "row", "vocabulary", "head")

    @property
    def decays(self) -> bool:
        """True if the parameter has weight decay."""
        return decays(self.shape)

    def parts(self, config: ModelConfig, dimension: int = 0) -> tuple[int, ...]:
        """Return the sizes of the parts along a dimension."""
        return tuple(_DIMENSIONS[term](config) for term in self.shape[dimension].split(" + "))

    def sizes(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the shape in numbers."""
        return tuple(sum(self.parts(config, dimension)) for dimension in range(len(self.shape)))

    def numel(self, config: ModelConfig) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes(config))


def decays(shape: Sequence[Any]) -> bool:
    """Return True if a parameter of this shape has weight decay: matrices and embeddings, not biases and norms."""
    return len(shape) >= 2


def _norm(name: str) -> tuple[Parameter, ...]:
    return (Parameter(f"{name}.weight", ("C",), "ones", "replicated"),
            Parameter(f"{name}.bias", ("C",), "zeros", "replicated", when="bias, layernorm"))


def _linear(name: str, outputs: str, inputs: str, tp: TpRule, when: str = "") -> tuple[Parameter, ...]:
    # The bias of a row-parallel layer is added once, to the sum.
    return (Parameter(f"{name}.weight", (outputs, inputs), "residual" if tp == "row" else "linear", tp, True,
                      when or "always"),
            Parameter(f"{name}.bias", (outputs,), "zeros", "replicated" if tp == "row" else tp,
                      when=f"{when}, bias" if when else "bias"))


BLOCK: list[Parameter] = [
    *_norm("ln_1"),
    *_linear("attn.c_attn", "C_q + C_kv + C_kv", "C", "column"),
    *(Parameter(f"attn.{part}_head_norm.weight", ("D",), "ones", "summed", when="qk_norm head") for part in "qk"),
    Parameter("attn.q_width_norm.weight", ("C_q",), "ones", "column", when="qk_norm width"),
    Parameter("attn.k_width_norm.weight", ("C_kv",), "ones", "column", when="qk_norm width"),
    *_linear("attn.c_proj", "C", "C_q", "row"),
    *_norm("ln_2"),
    *_linear("mlp.c_fc", "F", "C", "column"),
    *_linear("mlp.c_gate", "F", "C", "column", "swiglu"),
    *_linear("mlp.c_proj", "C", "F", "row"),
]
"""Parameters of every block, in the order of `Block.named_parameters`."""

BEFORE: tuple[Parameter, ...] = (Parameter(TABLE, ("V", "C"), "embedding", "vocabulary"),
                                 Parameter(_POSITIONS, ("T", "C"), "embedding", "replicated",
                                           when="learned positions"))
"""Parameters before the blocks. `is_matmul` is False even for a tied embedding, because `matrix_parameter_count`
always adds the output head."""

AFTER: tuple[Parameter, ...] = (*_norm("transformer.ln_f"),
                                Parameter(HEAD, ("V", "C"), "linear", "head", True, "untied"))
"""Parameters after the blocks."""


def add_to_block(*rows: Parameter) -> None:
    """Add parameters of a changed `Block` to the table.

    The table then determines their shapes, counts, initial weights, weight decay, memory, matmul FLOPs and tensor
    parallelism.

    Raises:
        ValueError: the table already has a row with this name.
    """
    for row in rows:
        if row.name in {present.name for present in BLOCK}:
            raise ValueError(f"{row.name} is already in the table of parameters")
        BLOCK.append(row)


_GPT2 = {"block_size": 1024, "vocab_size": 50257, "vocab_multiple": 128}
_LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "init": "llama"}
_QWEN3 = {**_LLAMA, "qk_norm": "head", "norm_eps": 1e-6, "rope_theta": 1e6}
_OLMO2 = {**_LLAMA, "qk_norm": "width", "norm_order": "after", "norm_eps": 1e-6}
_TINY = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257, "vocab_multiple": 64}

# GPT-2: Radford et al. 2019, with the vocabulary padded. GPT-3's 125M: Brown et al. 2020, table 2.1.
# shakespeare-char: nanoGPT's published configuration, with the tanh form of GELU (nanoGPT uses the erf form).
# llama3-8b: Llama team 2024 (arXiv:2407.21783), table 3. llama3-1b: Llama-3.2-1B with a context of 2,048 tokens, a
# vocabulary of 131,072 and unscaled rotary frequencies. tiny-*: small shapes for tests. The others: config.json of
# Llama-3.2-1B, Qwen3-0.6B-Base, OLMo-2-0425-1B and Mistral-7B-v0.3 on Hugging Face.
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny-gpt2": {**_TINY},
    "tiny-llama": {**_TINY, **_LLAMA, "n_kv_head": 2},
    "tiny-qwen3": {**_TINY, **_QWEN3, "n_kv_head": 2, "head_dim": 48},
    "tiny-olmo2": {**_TINY, **_OLMO2, "tied": False},
    "shakespeare-char": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65,
                         "vocab_multiple": 1, "bias": False, "dropout": 0.2},
    "gpt2-124m": {**_GPT2, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-355m": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-774m": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-1558m": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600},
    "gpt3-125m": {**_GPT2, "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 2048},
    "llama3-1b": {**_LLAMA, "n_layer": 16, "n_head": 32, "n_kv_head": 8, "n_embd": 2048,
                  "intermediate_size": 8192, "block_size": 2048, "vocab_size": 131072},
    "llama3-8b": {**_LLAMA, "n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096,
                  "intermediate_size": 14336, "block_size": 8192, "vocab_size": 128256, "tied": False},
    "llama3.2-1b": {**_LLAMA, "n_layer": 16, "n_head": 32, "n_kv_head": 8, "n_embd": 2048, "rope_factor": 32.0,
                    "intermediate_size": 8192, "block_size": 131072, "vocab_size": 128256},
    "qwen3-0.6b": {**_QWEN3, "n_layer": 28, "n_head": 16, "n_kv_head": 8, "n_embd": 1024, "head_dim": 128,
                   "intermediate_size": 3072, "block_size": 32768, "vocab_size": 151936},
    "olmo2-1b": {**_OLMO2, "n_layer": 16, "n_head": 16, "n_embd": 2048, "intermediate_size": 8192,
                 "block_size": 4096, "vocab_size": 100352, "tied": False},
    "mistral-7b": {**_LLAMA, "n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096, "rope_theta": 1e6,
                   "intermediate_size": 14336, "block_size": 32768, "vocab_size": 32768, "tied": False},
}

MODELS: dict[str, ModelConfig] = {name: ModelConfig(**shape) for name, shape in _SHAPES.items()}
"""All named models. With the tiny models and shakespeare-char, set vocab_size to the tokenizer's."""


def get_model_config(name: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a named model, with overrides; None keeps the model's value.

    Derived fields follow the overrides (for example, n_kv_head follows n_head). If the named model sets
    intermediate_size, an override of n_embd scales it in proportion.

    Raises:
        UserError: a name or field is unknown (the message suggests the nearest), or values are inconsistent.
    """
    if name not in _SHAPES:
        raise unknown_name_error("model", name, _SHAPES, where="--model")
    names = {field.name for field in fields(ModelConfig)}
    changes = {key: value for key, value in overrides.items() if value is not None}
    for key in changes.keys() - names:
        raise unknown_name_error("setting of a model", key, names, where=f"model {name}")
    shape = dict(_SHAPES[name])
    if "n_embd" in changes and "intermediate_size" in shape:
        shape["intermediate_size"] = round(shape["intermediate_size"] * changes["n_embd"] / shape["n_embd"])
    return ModelConfig(**(shape | changes))
