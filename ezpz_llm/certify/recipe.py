"""Recipe that every layout computes: the model, the batch, the optimizer and the tokens (imports no torch).

The shapes are small, so that the whole matrix runs on two cores, and still have everything that a layout may get
wrong: four layers, four heads, grouped keys and values and no biases in the one, a tied table in both, two
micro-steps or more, decay, clipping that bites on every step and a rate that moves.
"""

from __future__ import annotations

import math

import numpy as np

from ezpz_llm.model.config import ModelConfig, get_model_config

MODELS = ("tiny-gpt2", "tiny-llama")
DTYPES = ("fp32", "bf16_autocast", "bf16")
STEPS, QUICK_STEPS = 8, 3
"""Optimizer steps. Three have a steady one to watch, and see what benchmarks/mutations.py plants."""
GLOBAL_BATCH = 16
ACCUMULATION, PIPELINE_ACCUMULATION = 2, 4
SEED = 1337
DATA_SEED = 2024
CLIP = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-4
"""Above what rounding makes of an element whose gradient is 0 (7e-6 in bf16), and below a tenth of the median
gradient: with the usual 1e-8 Adam's first step has full size in a direction that rounding chose, and right runs
differ by all of it. What Adam does with its epsilon is judged element by element, in one process."""
WEIGHT_DECAY = 0.1
PEAK_LR, FLOOR_LR = 2e-3, 2e-4

_SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 96, "vocab_multiple": 32}
_PADDED = {"tiny-llama": {"vocab_size": 91}}
"""A vocabulary that its table pads to the other's 96: the last tensor-parallel rank has five rows of no symbol."""
SCALED = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000,
          "stage3_param_persistence_threshold": 1_000, "stage3_prefetch_bucket_size": 20_000,
          "stage3_max_live_parameters": 100_000, "stage3_max_reuse_distance": 20_000, "sub_group_size": 100_000}
"""The most elements that DeepSpeed puts in a bucket, or keeps gathered. What is usual is more than these models
are, and would leave untested that gradients fill several buckets and that stage 3 gathers and releases."""
SCALED_FOR = 210_304
"""Parameters of the smaller one of these models, that is."""
SMALLEST_FILE = 4096
"""Bytes from which on parameters and optimizer state go to files, where a layout has them there; DeepSpeed's own
least, 1 MiB, is more than any of these has."""

LOSS_CHUNK = 48
"""Tokens whose logits a layout has at once: several chunks of a micro batch, and a rest. The reference has all."""

LONG, ODD_VOCABULARY = 160, 90
"""Tokens of a sequence and symbols of what one process alone is also held to: more rows than a block of attention
has, and a vocabulary that its table pads."""
LONG_BATCH, LONG_STEPS = 4, 3
IGNORED_SHARE = 0.125
"""Of the targets there, another number of them in each micro batch."""
WIDE_CLIP, Z_LOSS = 100.0, 1e-3
"""Of its second run: a clip that no gradient reaches."""

HELD_OUT = 2 ** 20
"""Stands for the step whose batch is never trained on."""


def model_config(name: str) -> ModelConfig:
    """The shape that `name` has here: the tiny ones are made smaller still, others are taken as they are.

    Raises:
        UserError: an unknown name.
    """
    small = {**_SMALL, **_PADDED.get(name, {})} if name.startswith("tiny-") else {}
    return get_model_config(name, **small, dropout=0.0)


def learning_rate(step: int, steps: int) -> float:
    """Half a cosine from the peak to the floor, another value on every step."""
    return FLOOR_LR + (PEAK_LR - FLOOR_LR) * (1 + math.cos(math.pi * step / max(steps, 1))) / 2


def rate_factor(step: int, steps: int) -> float:
    """The same as a share of the peak, for rates that are somebody else's."""
    return learning_rate(step, steps) / PEAK_LR


def sequences(config: ModelConfig, step: int) -> np.ndarray:
    """(GLOBAL_BATCH, T + 1) tokens of a language with two successors a symbol, so that losses fall."""
    generator = np.random.default_rng((DATA_SEED, step))
    rows = [generator.integers(config.vocab_size, size=GLOBAL_BATCH)]
    for choice in generator.integers(2, size=(config.block_size, GLOBAL_BATCH)):
        rows.append((5 * rows[-1] + 7 * choice + 1) % config.vocab_size)
    return np.stack(rows, axis=1).astype(np.int64)


def zero_by_symmetry(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Parameters with elements [start, stop) whose gradient is nothing but rounding.

    A constant added to all keys adds the same to all scores of a query, which softmax ignores; unless positions
    turn the keys before the product. Adam makes steps of full size out of such a gradient's rounding, so that two
    right runs differ there by as much as the values themselves.
    """
    if not config.bias or config.position != "learned":
        return {}
    keys = (config.q_width, config.q_width + config.kv_width)
    return {f"transformer.h.{layer}.attn.c_attn.bias": keys for layer in range(config.n_layer)}
