"""Hugging Face's config.json and parameter names for the supported model families (imports no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ezpz_llm.core.base import UserError, as_type
from ezpz_llm.training.model.config import HEAD, TABLE, Mlp, ModelConfig, NormOrder, QKNorm
from ezpz_llm.training.model.parameters import parameter_shapes

_GELU: dict[str, Mlp] = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
_LARGE_VOCABULARY = 2 ** 15
_ROTARY: dict[str, Any] = {"rope_interleave": False, "rope_interleaved": False, "rope_traditional": False,
                           "partial_rotary_factor": 1}
"""Keys that state which dimensions rotate together, and the value that means ours. Files of other programs have
them (DeepSeek, Nanotron, MLX), and no tensor's shape shows the difference."""
_ABSENT = object()


def to_hf(config: ModelConfig, *, dtype: str = "float32", end_of_text: int | None = None) -> dict[str, Any]:
    """Return the config.json of the Hugging Face model with the same logits.

    Args:
        dtype: torch's name of the dtype of the stored weights.
        end_of_text: id of the token that begins and ends documents.

    Raises:
        UserError: Hugging Face has no equivalent model.
    """
    family = family_of(config)
    common = {"model_type": family, "torch_dtype": dtype, "vocab_size": config.vocab_size,
              "bos_token_id": end_of_text, "eos_token_id": end_of_text, "tie_word_embeddings": config.tied,
              "use_cache": True}
    if family == "gpt2":
        return {"architectures": ["GPT2LMHeadModel"], **common, "n_layer": config.n_layer, "n_head": config.n_head,
                "n_embd": config.n_embd, "n_positions": config.block_size, "n_ctx": config.block_size,
                "n_inner": config.intermediate_size,
                "activation_function": "gelu_new" if config.mlp == "gelu" else "gelu",
                "layer_norm_epsilon": config.norm_eps,
                **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)}
    stored = {"architectures": [_FAMILIES[family].architecture], **common, "num_hidden_layers": config.n_layer,
              "num_attention_heads": config.n_head, "num_key_value_heads": config.n_kv_head,
              "hidden_size": config.n_embd, "head_dim": config.head_dim,
              "intermediate_size": config.intermediate_size, "max_position_embeddings": config.block_size,
              "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
              "attention_bias": config.bias, "mlp_bias": config.bias, "attention_dropout": 0.0}
    if config.rope_factor != 1:
        stored["rope_scaling"] = {"rope_type": "llama3", "factor": config.rope_factor,
                                  "low_freq_factor": config.rope_low, "high_freq_factor": config.rope_high,
                                  "original_max_position_embeddings": config.rope_context}
    if family == "mistral":
        stored["sliding_window"] = config.window
    return stored


def from_hf(stored: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a config.json describes, without dropout.

    Args:
        where: path of the file, for messages.

    Raises:
        UserError: the model type or one of its settings is not supported.
    """
    stored = as_type(dict[str, Any], stored, where)
    family, keys = stored.get("model_type"), _Keys(stored, where)
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(f"model_type is {family!r}", where=where,
                        instead=f"a model of one of these: {', '.join(_FAMILIES)}")
    try:
        return _from_gpt2(keys) if family == "gpt2" else _from_llama(keys, _FAMILIES[family])
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"a setting is invalid: {error}", where=where,
                        instead="the config.json that belongs to the weights") from error


class _Keys:
    """Access to the keys of a config.json."""

    def __init__(self, stored: Mapping[str, Any], where: str) -> None:
        self.stored, self.where = stored, where

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        """Return a value, or `default` if it is absent or null."""
        value = self.stored.get(name)
        if value is None and default is _ABSENT:
            raise UserError(f"{name} is missing", where=self.where,
                            instead="the config.json that belongs to the weights")
        return default if value is None else value

    def must_be(self, name: str, value: Any, *allowed: Any) -> None:
        """Reject a value that changes the computation in an unsupported way."""
        if value not in allowed:
            raise UserError(f"{name} is {value!r}, which is not supported", where=self.where,
                            instead=f"a checkpoint with {name} {' or '.join(map(repr, allowed))}")


def _vocabulary(keys: _Keys) -> dict[str, Any]:
    """Return the vocabulary settings; pad only large vocabularies, since padded rows take part in the softmax."""
    size = keys.get("vocab_size")
    return {"vocab_size": size, "vocab_multiple": 128 if size >= _LARGE_VOCABULARY else 1}


def _from_gpt2(keys: _Keys) -> ModelConfig:
    activation = keys.get("activation_function", "gelu_new")
    keys.must_be("activation_function", activation, *_GELU)
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False),
                        ("add_cross_attention", False)):
        keys.must_be(name, keys.get(name, value), value)
    return ModelConfig(n_layer=keys.get("n_layer"), n_head=keys.get("n_head"), n_embd=keys.get("n_embd"),
                       block_size=keys.get("n_positions", keys.stored.get("n_ctx", 1024)),
                       **_vocabulary(keys), intermediate_size=keys.get("n_inner", 0), mlp=_GELU[activation],
                       norm_eps=keys.get("layer_norm_epsilon", 1e-5), tied=keys.get("tie_word_embeddings", True))


def _from_llama(keys: _Keys, family: _Family) -> ModelConfig:
    keys = _Keys({**family.absent, **keys.stored}, keys.where)
    # transformers 5 keeps the RoPE settings in rope_parameters, earlier versions in rope_theta and rope_scaling.
    rope = {**(keys.get("rope_scaling", {})), **(keys.get("rope_parameters", {}))}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    keys.must_be("rope_type", rope_type, "default", "llama3")
    for name, value in _ROTARY.items():
        keys.must_be(name, rope.get(name, keys.get(name, value)), value)
    keys.must_be("hidden_act", keys.get("hidden_act", "silu"), "silu", "swish")
    keys.must_be("use_sliding_window", keys.get("use_sliding_window", False), False)
    window = 0
    if family.architecture.startswith("Mistral"):  # transformers ignores its layer_types
        window = keys.get("sliding_window", 0)
    else:
        for layer_type in keys.get("layer_types", []):
            keys.must_be("layer_types", layer_type, "full_attention")
    bias = keys.get("attention_bias", False)
    if family.architecture != "LlamaForCausalLM":  # other families have biases in attention only
        keys.must_be("attention_bias", bias, False)
    keys.must_be("mlp_bias", keys.get("mlp_bias", False), bias)
    heads, width = keys.get("num_attention_heads"), keys.get("hidden_size")
    context = keys.get("max_position_embeddings")
    return ModelConfig(n_layer=keys.get("num_hidden_layers"), n_head=heads, n_embd=width,
                       n_kv_head=keys.get("num_key_value_heads", heads),
                       head_dim=keys.get("head_dim", width // heads),
                       block_size=min(context, window or context), window=window, **_vocabulary(keys),
                       qk_norm=family.qk_norm, norm_order=family.norm_order,
                       **_rope_scaling(_Keys(rope, keys.where), rope_type, context),
                       intermediate_size=keys.get("intermediate_size"), norm="rmsnorm",
                       norm_eps=keys.get("rms_norm_eps", 1e-6), position="rope",
                       rope_theta=float(rope.get("rope_theta", keys.get("rope_theta", 10000.0))), mlp="swiglu",
                       bias=bias, tied=keys.get("tie_word_embeddings", False), init="llama")


def _rope_scaling(rope: _Keys, rope_type: str, context: int) -> dict[str, Any]:
    """Return our settings for the RoPE scaling of Llama 3.1."""
    if rope_type == "default":
        return {}
    return {"rope_factor": float(rope.get("factor")), "rope_low": float(rope.get("low_freq_factor")),
            "rope_high": float(rope.get("high_freq_factor")),
            "rope_context": rope.get("original_max_position_embeddings", context)}


_LLAMA = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
          "attn.q_head_norm": "self_attn.q_norm", "attn.k_head_norm": "self_attn.k_norm",
          "attn.q_width_norm": "self_attn.q_norm", "attn.k_width_norm": "self_attn.k_norm",
          "mlp.c_fc": "mlp.up_proj", "mlp.c_gate": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
_TOP_LEVEL = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


@dataclass(frozen=True)
class _Family:
    """Row of the table of families: the class in transformers, and its differences from Llama.

    `absent` has the values of keys that config.json omits, where they differ from Llama's. A null value means the
    same as in Llama.
    """

    architecture: str
    qk_norm: QKNorm = "none"
    norm_order: NormOrder = "before"
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    absent: Mapping[str, Any] = field(default_factory=dict)


_FAMILIES = {
    "gpt2": _Family("GPT2LMHeadModel"),
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", absent={"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm="head", absent={"num_key_value_heads": 32, "head_dim": 128}),
    "olmo2": _Family("Olmo2ForCausalLM", "width", "after",
                     {**_LLAMA, "ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"},
                     absent={"rms_norm_eps": 1e-5}),
}
"""Model families by Hugging Face's model_type; all except GPT-2 are variants of Llama."""
ARCHITECTURES = tuple(family.architecture for family in _FAMILIES.values())
"""Names of the supported model classes in transformers."""


@dataclass(frozen=True)
class StoredTensor:
    """Hugging Face tensor that holds rows `first` to `stop` of the plain model's parameter `ours`.

    `shape` is in the plain model's orientation; GPT-2 stores linear layers transposed, as (in, out).
    """

    name: str
    ours: str
    first: int
    stop: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape


def family_of(config: ModelConfig) -> str:
    """Return the model_type of the equivalent Hugging Face model.

    Raises:
        UserError: there is none.
    """
    parts = (config.norm, config.position, config.mlp.removesuffix("_erf"))
    is_gpt2 = parts == ("layernorm", "learned", "gelu") and config.q_width == config.kv_width == config.n_embd
    if is_gpt2 and (config.qk_norm, config.norm_order) == ("none", "before"):
        return "gpt2"
    if parts == ("rmsnorm", "rope", "swiglu"):
        for name, family in _FAMILIES.items():
            if (name != "gpt2" and (name == "mistral") == (config.window > 0)
                    and (family.qk_norm, family.norm_order) == (config.qk_norm, config.norm_order)
                    and not (config.bias and name != "llama")):
                return name
    raise UserError(f"Hugging Face's {', '.join(_FAMILIES)} have no model with {', '.join(parts)}, qk_norm "
                    f"{config.qk_norm}, norms {config.norm_order} each sublayer, {config.n_kv_head} key/value "
                    f"heads for {config.n_head} heads and bias {config.bias}", where="model",
                    instead="layernorm, learned positions, gelu and as many key/value heads (GPT-2), or rmsnorm, "
                            "rope and swiglu (Llama and its variants)")


def stored_tensors(config: ModelConfig) -> list[StoredTensor]:
    """Return the Hugging Face tensors of a model, in the plain model's order, without padded vocabulary rows.

    GPT-2 in transformers always has biases: if `config` has none, the list contains them, to be filled with zeros.
    """
    family = family_of(config)
    shapes = parameter_shapes(replace(config, bias=True) if family == "gpt2" else config)
    tensors: list[StoredTensor] = []
    for name, shape in shapes.items():
        if name in (TABLE, HEAD):
            shape = (config.vocab_size, config.n_embd)
        tensors += (_gpt2_tensors(config, name, shape) if family == "gpt2" else
                    _llama_tensors(config, name, shape, _FAMILIES[family].names))
    return tensors


def _gpt2_tensors(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    linear = name.endswith(".weight") and (".attn." in name or ".mlp." in name)
    yield StoredTensor(name, name, 0, shape[0], shape, transposed=linear)


def _llama_tensors(config: ModelConfig, name: str, shape: tuple[int, ...],
                   names: Mapping[str, str]) -> Iterator[StoredTensor]:
    module, _, kind = name.rpartition(".")
    if module in _TOP_LEVEL:
        yield StoredTensor(f"{_TOP_LEVEL[module]}.{kind}", name, 0, shape[0], shape)
        return
    layer, _, inner = module.removeprefix("transformer.h.").partition(".")
    if inner in names:
        yield StoredTensor(f"model.layers.{layer}.{names[inner]}.{kind}", name, 0, shape[0], shape)
        return
    first = 0
    for part, rows in (("q", config.q_width), ("k", config.kv_width), ("v", config.kv_width)):
        yield StoredTensor(f"model.layers.{layer}.self_attn.{part}_proj.{kind}", name, first, first + rows,
                           (rows, *shape[1:]))
        first += rows
