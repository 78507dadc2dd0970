"""Whole runs by name, and the published recipe that belongs to a model (imports no torch).

A preset sits between a YAML file and the defaults; naming a model alone brings that model's recipe.

Sources. Rates, batches, and warm-up and decay in tokens: Brown et al. 2020 (arXiv:2005.14165), table 2.1 and
appendix B, as the public GPT-2 reproduction build-nanogpt uses them; its micro batch and its intervals.
llama3-1b: batch, steps and intervals of a published run of that shape, and, as it states no rates, those of Touvron
et al. 2023 (arXiv:2302.13971). shakespeare-char: nanoGPT's configuration, on CPUs its yardstick, with the tanh form
of GELU (nanoGPT's own model has erf's); wordplay's run has GPT-2's 124M shape on characters.
"""

from __future__ import annotations

from typing import Any

_ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
_GPT = {**_ADAMW, "warmup_steps": 715, "steps": 19073}


RECIPES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**_GPT, "lr": 6e-4},
    "gpt2-355m": {**_GPT, "lr": 3e-4},
    "gpt2-774m": {**_GPT, "lr": 2.5e-4},
    "gpt2-1558m": {**_GPT, "lr": 2e-4},
    "gpt3-125m": {**_GPT, "lr": 6e-4},
    "llama3-1b": {**_GPT, "lr": 3e-4},
    "llama3-8b": {**_GPT, "lr": 3e-4},
    "shakespeare-char": {"corpus": "shakespeare", "lr": 1e-3, "beta2": 0.99, "steps": 5000,
                         "global_batch": 64, "accumulation": 1, "eval_tokens": 0},
}
"""Hyper-parameters that come with a model's name."""

_HALF_M, _ONE_M, _G = 2**19, 2**20, 10**9
_WARMUP_TOKENS = 375_000_000


def _fineweb(model: str, micro_batch: int, *, tokens: int = 10 * _G, decay_tokens: int | None = None,
             batch_tokens: int = _HALF_M, block_size: int = 1024, **more: Any) -> dict[str, Any]:
    """A run on FineWeb-Edu, its schedule given in tokens; rates end at a tenth of their peak."""
    schedule = {} if decay_tokens is None else {"decay_steps": round(decay_tokens / batch_tokens)}
    return {
        "model": model, **RECIPES[model], "block_size": block_size, "vocab_multiple": 128, "dropout": 0.0,
        "corpus": "fineweb-edu", "tokenizer": "gpt2", "precision": "bf16", "seed": 1337,
        "global_batch": batch_tokens // block_size, "micro_batch": micro_batch,
        "steps": round(tokens / batch_tokens), "warmup_steps": round(_WARMUP_TOKENS / batch_tokens), **schedule,
        # 20 batches of 8 x 64 sequences of 1024.
        "eval_every": 250, "eval_tokens": 20 * 2**19, "save_every": 5000,
        "sample_every": 250, "sample_tokens": 32, "prompt": "Hello, I'm a language model,", **more,
    }

FINE_TUNING = {"lr": 3e-5}
"""What weights that are trained already want, where nothing else is said."""


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m-fineweb": _fineweb("gpt2-124m", 64),
    "gpt2-355m-fineweb": _fineweb("gpt2-355m", 32),
    "gpt2-774m-fineweb": _fineweb("gpt2-774m", 16),
    "gpt2-1558m-fineweb": _fineweb("gpt2-1558m", 16, batch_tokens=_ONE_M),
    "gpt3-125m": _fineweb("gpt3-125m", 32, tokens=300 * _G, decay_tokens=260 * _G, block_size=2048),
    "llama3-1b": _fineweb("llama3-1b", 64, tokens=20 * _G, batch_tokens=_ONE_M, block_size=2048,
                          warmup_steps=2000, recompute=1, save_every=2500),
    "wordplay-shakespeare-char": {
        "model": "shakespeare-char", **_ADAMW, "lr": 6e-4,
        "n_layer": 12, "n_head": 12, "n_kv_head": 12, "n_embd": 768, "block_size": 1024, "dropout": 0.0,
        "bias": False, "corpus": "shakespeare", "tokenizer": "char", "precision": "bf16", "seed": 1337,
        "global_batch": 256, "micro_batch": 64, "accumulation": None, "steps": 1000, "warmup_steps": 100,
        "eval_every": 100, "eval_tokens": 0, "sample_every": 100, "prompt": "What is an LLM?", "save_every": 0,
        "log_every": 10,
    },
    "shakespeare-char-cpu": {
        "model": "shakespeare-char", "n_layer": 4, "n_head": 4, "n_kv_head": 4, "n_embd": 128, "block_size": 64,
        "dropout": 0.0, "bias": False, "corpus": "shakespeare", "tokenizer": "char",
        "global_batch": 12, "accumulation": 1, "steps": 2000, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 100,
        "beta2": 0.99, "clip": 1.0, "precision": "fp32", "eval_every": 500, "eval_tokens": 0, "save_every": 0,
    },
}
"""Whole runs. A global batch holds for any number of ranks, a micro batch is the largest to be taken at once."""

ADOPTS_VOCABULARY = ("tiny-gpt2", "tiny-llama", "shakespeare-char")
"""Models for trying things out, whose vocabulary is the tokenizer's; the others keep their own size."""


