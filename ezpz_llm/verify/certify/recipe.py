"""Training recipe of all layouts: model, batch, optimizer and tokens (imports no torch).

The models are small, so that the whole matrix runs on two cores, but have everything that a layout may get wrong:
four layers and heads, grouped-query attention without biases in two of them, tied embeddings in all, at least two
micro-steps, weight decay, active clipping on every step, and a changing learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.model.config import ModelConfig, get_model_config

Rows = Callable[[np.ndarray, int], np.ndarray]
"""Function from a global batch and its step to the sequences (n, T + 1) of this rank, in micro-batch order."""

GPT2, LLAMA = MODELS = ("tiny-gpt2", "tiny-llama")
PATHS = "tiny-paths"
"""Model with long sequences, recomputed activations, ignored targets, and a z-loss, also on three ranks."""
WIDE = "tiny-wide"
"""Model with document masks, also in recomputed activations, uneven targets, an odd vocabulary, layers that stages
do not divide, and a single micro-batch on four ranks."""
ALL_MODELS = (*MODELS, PATHS, WIDE)
DTYPES = ("fp32", "bf16_autocast", "bf16")
STEPS, QUICK_STEPS = 8, 3
"""Optimizer steps. Three include a steady-state step, and detect the faults of benchmarks/mutations.py."""
SEED_STEPS = 1
"""Steps of one process before the checkpoint that all layouts load, so that they resume with moments."""
ACCUMULATION, PIPELINE_ACCUMULATION = 2, 4
SEED = 1337
DATA_SEED = 2024
CLIP = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-4
"""Above the rounding of an element whose gradient is 0 (7e-6 in bf16), and below a tenth of the median gradient.
With the usual 1e-8, rounding alone would determine the sign of full-size Adam steps, and correct runs would differ.
The comparison of the single process covers epsilon element by element."""
WEIGHT_DECAY = 0.1
PEAK_LR, FLOOR_LR = 2e-3, 2e-4

_SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 96, "vocab_multiple": 32}
_PADDED = {"vocab_size": 91}
"""Vocabulary size that is padded to 96, the size of tiny-gpt2, so that the last tensor-parallel rank has five
padding rows."""
_ODD = {"n_layer": 3, "n_embd": 96, "vocab_size": 179, "vocab_multiple": 2}
"""Layers and tokens that ranks do not divide: the padded vocabulary has 90 rows on each of two ranks."""
SCALED = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000,
          "stage3_param_persistence_threshold": 1_000, "stage3_prefetch_bucket_size": 20_000,
          "stage3_max_live_parameters": 100_000, "stage3_max_reuse_distance": 20_000, "sub_group_size": 100_000}
"""Upper limits of DeepSpeed's buckets and thresholds, in elements. The defaults exceed the size of these models, so
gradients would never fill several buckets and stage 3 would never release parameters."""
SCALED_FOR = 210_304
"""Number of parameters of the smaller model, for which SCALED is meant."""
SMALLEST_FILE = 4096
"""Minimum size in bytes of tensors that are offloaded to files. DeepSpeed's 1 MiB exceeds every tensor here."""

REDUCE_BUCKET = SCALED["reduce_bucket_size"]
"""Elements of a bucket of ezpz_llm's own reducer."""

LOSS_CHUNK = 48
"""Tokens per chunk of the loss in layouts: several chunks and a remainder. The reference has no chunks."""

LONG, ODD_VOCABULARY = 160, 90
"""Sequence length and vocabulary size of the single-process runs in `uncovered_paths`: more rows than a block of
the attention kernel, and a padded vocabulary."""
LONG_BATCH, LONG_STEPS = 4, 3
IGNORED_SHARE = 0.125
"""Mean share of ignored targets in `uncovered_paths`; it differs between micro-batches."""
WIDE_CLIP, Z_LOSS = 100.0, 1e-3
"""Settings of the second run in `uncovered_paths`; no gradient norm reaches this clip."""

HELD_OUT = 2 ** 20
"""Step number that seeds the held-out batch; no run has as many steps."""

END_OF_TEXT = 7
"""Token at the start of each document of `tiny-wide`."""
_PROMPTS, NEW_TOKENS = 8, 4
"""Number of prompts, and of tokens that each is extended by."""


@dataclass(frozen=True)
class Shape:
    """Model and batch of a case.

    Attributes:
        config: the model, without dropout.
        global_batch: sequences per step.
        ignore_every: one in so many targets of each sequence is ignored; 0: none.
        z_loss: weight of the z-loss.
        recompute: the activations of every N-th block are recomputed; 0: none.
        micro_batches: micro-batches of all ranks in a step, for a batch with uneven numbers of targets; 0: the
            layout chooses, and all micro-batches have the same number of targets.
        end_of_text: token between documents, which attention then separates.
    """

    config: ModelConfig
    global_batch: int = 16
    ignore_every: int = 0
    z_loss: float = 0.0
    recompute: int = 0
    micro_batches: int = 0
    end_of_text: int | None = None


def shape(name: str) -> Shape:
    """Return the shape of a model; certify scales the tiny models down further.

    Raises:
        UserError: an unknown name.
    """
    if name == PATHS:
        config = get_model_config("tiny-llama", **{**_SMALL, **_PADDED, "block_size": LONG}, dropout=0.0)
        # 24 sequences can be split evenly over 2, 3, or 4 ranks with 2 micro-batches each.
        return Shape(config, global_batch=24, ignore_every=8, z_loss=Z_LOSS, recompute=2)
    if name == WIDE:
        config = get_model_config("tiny-gpt2", **{**_SMALL, **_ODD}, dropout=0.0)
        return Shape(config, micro_batches=4, end_of_text=END_OF_TEXT, recompute=2)
    small = {} if not name.startswith("tiny-") else {**_SMALL, **_PADDED} if name == "tiny-llama" else _SMALL
    return Shape(get_model_config(name, **small, dropout=0.0))


def model_config(name: str) -> ModelConfig:
    """Return the config of a model; see `shape`."""
    return shape(name).config


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, half a cosine from the peak to the floor."""
    return FLOOR_LR + (PEAK_LR - FLOOR_LR) * (1 + math.cos(math.pi * step / max(steps, 1))) / 2


def rate_factor(step: int, steps: int) -> float:
    """Return the factor by which to scale a target's own learning rate at a step."""
    return learning_rate(step, steps) / PEAK_LR


def sequences(config: ModelConfig, step: int, number: int) -> np.ndarray:
    """Return (number, T + 1) tokens of a language that can be learned: each symbol has two successors."""
    generator = np.random.default_rng((DATA_SEED, step))
    rows = [generator.integers(config.vocab_size, size=number)]
    for choice in generator.integers(2, size=(config.block_size, number)):
        rows.append((5 * rows[-1] + 7 * choice + 1) % config.vocab_size)
    return np.stack(rows, axis=1).astype(np.int64)


def tokens_and_targets(rows: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Split (n, T + 1) tokens into inputs and targets (n, T) of a training step.

    With `ignore_every`, a multiple of which T must be, each row ignores one in so many targets, beginning at a
    position that depends on its first token. All these rows ignore the same number, because a step averages the
    means of micro-batches. With `micro_batches`, the rows have `uneven_targets`.
    """
    if shape.micro_batches:
        return uneven_targets(rows)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    if not shape.ignore_every:
        return tokens, targets
    ignored = (np.arange(tokens.shape[1]) + rows[:, :1]) % shape.ignore_every == 0
    return tokens, np.where(ignored, IGNORED, targets)


def uneven_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split (n, T + 1) tokens into inputs and targets (n, T), with between 1 and T targets in a row, at its end.

    The number depends on a row's second token, so that it is the same on any rank.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    length = tokens.shape[1]
    first = (rows[:, 1:2] * 37) % length
    return tokens, np.where(np.arange(length) < first, IGNORED, targets)


def prompts(config: ModelConfig) -> np.ndarray:
    """Return (_PROMPTS, T - 3) tokens to extend: an odd length, which grows beyond the model's context T."""
    return sequences(config, HELD_OUT - 1, _PROMPTS)[:, :config.block_size - 3]


def zero_by_symmetry(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return parameters with an element range [start, stop) whose exact gradient is 0.

    A constant added to all keys shifts all scores of a query equally, which softmax ignores (except with rotary
    positions). Adam turns the rounding error of such a gradient into full-size steps, so correct runs differ there
    by as much as the values themselves.
    """
    if not config.bias or config.position != "learned":
        return {}
    keys = (config.q_width, config.q_width + config.kv_width)
    return {f"transformer.h.{layer}.attn.c_attn.bias": keys for layer in range(config.n_layer)}
