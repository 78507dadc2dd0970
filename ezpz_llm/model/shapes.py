"""The plain model's parameters by name and shape, from its configuration alone (imports no torch).

Symbols: C width, C_kv width of all keys, V padded vocabulary, T context.
"""

from __future__ import annotations

from ezpz_llm.model.config import ModelConfig

TABLE, HEAD, POSITIONS = "transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"
"""The token table, the output head where it is not that table, and the table of learned positions."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of `GPT.named_parameters`; a tied head is left out."""
    width, hidden, rows = config.n_embd, config.intermediate_size, config.padded_vocab_size

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        biased = config.norm == "layernorm" and config.bias
        return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if biased else {})}

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if config.bias else {})}

    shapes: dict[str, tuple[int, ...]] = {TABLE: (rows, width)}
    if config.position == "learned":
        shapes[POSITIONS] = (config.block_size, width)
    for layer in range(config.n_layer):
        block = f"transformer.h.{layer}"
        shapes |= norm(f"{block}.ln_1")
        shapes |= linear(f"{block}.attn.c_attn", width, width + 2 * config.kv_width)
        shapes |= linear(f"{block}.attn.c_proj", width, width)
        shapes |= norm(f"{block}.ln_2")
        shapes |= linear(f"{block}.mlp.c_fc", width, hidden)
        if config.mlp == "swiglu":
            shapes |= linear(f"{block}.mlp.c_gate", width, hidden)
        shapes |= linear(f"{block}.mlp.c_proj", hidden, width)
    shapes |= norm("transformer.ln_f")
    if not config.tied:
        shapes[HEAD] = (rows, width)
    return shapes
