"""What Hugging Face's GPT-2 and Llama call the parameters of the plain model (imports no torch).

Symbols: C width, C_kv width of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.shapes import HEAD, TABLE, parameter_shapes

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
    found = []
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
