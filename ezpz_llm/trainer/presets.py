"""Whole runs by name, and the published recipe that belongs to a model (imports no torch).

A preset sits between a YAML file and the defaults; naming a model alone brings that model's recipe.
Sources: the GPT-2 figures are those of Radford et al. 2019 and Brown et al. 2020, table 2.1, as used by public
reproductions; the character-level run is nanoGPT's CPU yardstick.
"""

from __future__ import annotations

from typing import Any

_GPT = {"beta2": 0.95, "weight_decay": 0.1, "clip": 1.0, "warmup_steps": 715, "steps": 19073}

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

PRESETS: dict[str, dict[str, Any]] = {
    "shakespeare-char-cpu": {
        "model": "shakespeare-char", "n_layer": 4, "n_head": 4, "n_kv_head": 4, "n_embd": 128, "block_size": 64,
        "dropout": 0.0, "bias": False, "corpus": "shakespeare", "tokenizer": "char",
        "global_batch": 12, "accumulation": 1, "steps": 2000, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 100,
        "beta2": 0.99, "clip": 1.0, "precision": "fp32", "eval_every": 500, "eval_tokens": 0, "save_every": 0,
    },
}
"""Whole runs."""

ADOPTS_VOCABULARY = ("tiny-gpt2", "tiny-llama", "shakespeare-char")
"""Models for trying things out, whose vocabulary is the tokenizer's; the others keep their own size."""
