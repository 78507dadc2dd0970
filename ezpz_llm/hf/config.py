"""Hugging Face's config.json and parameter names of GPT-2 and Llama, to and from ours (imports no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import as_type
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import HEAD, TABLE, parameter_shapes

_GELU = ("gelu_new", "gelu_pytorch_tanh")
_LARGE = 2 ** 15
_ABSENT = object()


def to_hf(config: ModelConfig, *, dtype: str = "float32", end_of_text: int | None = None) -> dict[str, Any]:
    """config.json of the model with the same logits.

    Args:
        dtype: torch's name of the type the weights are stored in.
        end_of_text: the tokenizer's id that begins and ends documents.

    Raises:
        UserError: Hugging Face has no such model.
    """
    family = family_of(config)
    common = {"model_type": family, "torch_dtype": dtype, "vocab_size": config.vocab_size,
              "bos_token_id": end_of_text, "eos_token_id": end_of_text, "tie_word_embeddings": config.tied,
              "use_cache": True}
    if family == "gpt2":
        return {"architectures": ["GPT2LMHeadModel"], **common, "n_layer": config.n_layer, "n_head": config.n_head,
                "n_embd": config.n_embd, "n_positions": config.block_size, "n_ctx": config.block_size,
                "n_inner": config.intermediate_size, "activation_function": "gelu_new",
                "layer_norm_epsilon": config.norm_eps,
                **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)}
    return {"architectures": ["LlamaForCausalLM"], **common, "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head, "num_key_value_heads": config.n_kv_head,
            "hidden_size": config.n_embd, "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size, "max_position_embeddings": config.block_size,
            "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
            "attention_bias": config.bias, "mlp_bias": config.bias, "attention_dropout": 0.0}


def from_hf(stored: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a config.json describes, without dropout.

    Args:
        where: the file, for messages.

    Raises:
        UserError: a kind of model, or a setting of one, that ours cannot compute.
    """
    stored = as_type(dict[str, Any], stored, where)
    read = {"gpt2": _from_gpt2, "llama": _from_llama}.get(str(stored.get("model_type")))
    if read is None:
        raise UserError(f"model_type is {stored.get('model_type')!r}", where=where,
                        instead="a GPT-2 or Llama model (model_type gpt2 or llama)")
    try:
        return read(_Keys(stored, where))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"a setting is not what such a model has: {error}", where=where,
                        instead="the config.json that belongs to the weights") from error


class _Keys:
    """The members of a config.json."""

    def __init__(self, stored: Mapping[str, Any], where: str) -> None:
        self.stored, self.where = stored, where

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        """A member; its default where it is absent or null."""
        value = self.stored.get(name)
        if value is None and default is _ABSENT:
            raise UserError(f"{name} is missing", where=self.where,
                            instead="the config.json that belongs to the weights")
        return default if value is None else value

    def must_be(self, name: str, value: Any, *allowed: Any) -> None:
        """Refuse a value that would compute something else."""
        if value not in allowed:
            raise UserError(f"{name} is {value!r}, which this model does not compute", where=self.where,
                            instead=f"a checkpoint with {name} {' or '.join(map(repr, allowed))}")


def _vocabulary(keys: _Keys) -> dict[str, Any]:
    """Padded only where that is a small part: the rows that are added take part in the softmax."""
    size = keys.get("vocab_size")
    return {"vocab_size": size, "vocab_multiple": 128 if size >= _LARGE else 1}


def _from_gpt2(keys: _Keys) -> ModelConfig:
    keys.must_be("activation_function", keys.get("activation_function", "gelu_new"), *_GELU)
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False),
                        ("add_cross_attention", False)):
        keys.must_be(name, keys.get(name, value), value)
    return ModelConfig(n_layer=keys.get("n_layer"), n_head=keys.get("n_head"), n_embd=keys.get("n_embd"),
                       block_size=keys.get("n_positions", keys.stored.get("n_ctx", 1024)),
                       **_vocabulary(keys), intermediate_size=keys.get("n_inner", 0),
                       norm_eps=keys.get("layer_norm_epsilon", 1e-5), tied=keys.get("tie_word_embeddings", True))


def _from_llama(keys: _Keys) -> ModelConfig:
    # transformers 5 keeps the rotation in rope_parameters, earlier versions in rope_theta and rope_scaling.
    rope = {**(keys.get("rope_scaling", {})), **(keys.get("rope_parameters", {}))}
    keys.must_be("rope_type", rope.get("rope_type", rope.get("type", "default")), "default")
    keys.must_be("hidden_act", keys.get("hidden_act", "silu"), "silu", "swish")
    bias = keys.get("attention_bias", False)
    keys.must_be("mlp_bias", keys.get("mlp_bias", False), bias)
    heads, width = keys.get("num_attention_heads"), keys.get("hidden_size")
    keys.must_be("head_dim", keys.get("head_dim", width // heads), width // heads)
    return ModelConfig(n_layer=keys.get("num_hidden_layers"), n_head=heads, n_embd=width,
                       n_kv_head=keys.get("num_key_value_heads", heads),
                       block_size=keys.get("max_position_embeddings"), **_vocabulary(keys),
                       intermediate_size=keys.get("intermediate_size"), norm="rmsnorm",
                       norm_eps=keys.get("rms_norm_eps", 1e-6), position="rope",
                       rope_theta=float(rope.get("rope_theta", keys.get("rope_theta", 10000.0))), mlp="swiglu",
                       bias=bias, tied=keys.get("tie_word_embeddings", False), init="llama")


# What Hugging Face's GPT-2 and Llama call the parameters of the plain model.
Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Stored:
    """A tensor at Hugging Face: rows `first` to `stop` of the plain model's parameter `ours`.

    `shape` is in the plain model's orientation; GPT-2 stores its linear layers the other way round, (in, out).
    """

    name: str
    ours: str
    first: int
    stop: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape


def family_of(config: ModelConfig) -> Family:
    """The Hugging Face model that computes the same.

    Raises:
        UserError: there is none.
    """
    parts = (config.norm, config.position, config.mlp)
    if parts == ("layernorm", "learned", "gelu") and config.n_kv_head == config.n_head:
        return "gpt2"
    if parts == ("rmsnorm", "rope", "swiglu"):
        return "llama"
    raise UserError(f"Hugging Face's GPT-2 and Llama have no model with {', '.join(parts)} and {config.n_kv_head} "
                    f"key/value heads for {config.n_head} heads", where="model",
                    instead="layernorm, learned positions, gelu and as many key/value heads (GPT-2), or rmsnorm, "
                            "rope and swiglu (Llama)")


def stored_tensors(config: ModelConfig) -> list[Stored]:
    """Every tensor that the model has at Hugging Face, in the plain model's order, without padded vocabulary rows.

    GPT-2 there always has biases: where `config` has none, their names are in the list, and zeros belong there.
    """
    family = family_of(config)
    shapes = parameter_shapes(replace(config, bias=True) if family == "gpt2" else config)
    tensors = _gpt2 if family == "gpt2" else _llama
    found: list[Stored] = []
    for name, shape in shapes.items():
        if name in (TABLE, HEAD):
            shape = (config.vocab_size, config.n_embd)
        found += tensors(config, name, shape)
    return found


def _gpt2(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    linear = name.endswith(".weight") and (".attn." in name or ".mlp." in name)
    yield Stored(name, name, 0, shape[0], shape, transposed=linear)


_LLAMA = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
          "mlp.c_fc": "mlp.up_proj", "mlp.c_gate": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
_OUTSIDE = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


def _llama(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        yield Stored(f"{_OUTSIDE[module]}.{kind}", name, 0, shape[0], shape)
        return
    layer, _, inner = module.removeprefix("transformer.h.").partition(".")
    if inner in _LLAMA:
        yield Stored(f"model.layers.{layer}.{_LLAMA[inner]}.{kind}", name, 0, shape[0], shape)
        return
    first = 0
    for part, rows in (("q", config.n_embd), ("k", config.kv_width), ("v", config.kv_width)):
        yield Stored(f"model.layers.{layer}.self_attn.{part}_proj.{kind}", name, first, first + rows,
                     (rows, *shape[1:]))
        first += rows
