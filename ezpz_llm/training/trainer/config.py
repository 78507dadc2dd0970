"""Configuration of a training run: every option with its default, published recipes and presets (imports no torch).

Precedence, highest first: the command line, the user's own ds_config (batch sizes, clipping, precision; see
training/layout/resolve.py), a YAML file, a preset, the model's published recipe, and the defaults below.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ezpz_llm.core.base import MAX_RANKS, MAX_STEPS, MAX_TOKENS, Range
from ezpz_llm.training.layout.optimizers import OPTIMIZERS, OptimizerName
from ezpz_llm.training.model.config import Recompute


def _value(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Batch sizes are in sequences, lengths in tokens, intervals in optimizer steps."""

    model: str = _value("tiny-gpt2", "model shape by name, such as gpt2-124m or llama3-1b")
    n_layer: int | None = _value(None, "transformer blocks (default: the model's)")
    n_head: int | None = _value(None, "attention heads (default: the model's)")
    n_kv_head: int | None = _value(None, "key/value heads (default: the model's)")
    n_embd: int | None = _value(None, "width (default: the model's)")
    block_size: int | None = _value(None, "context length in tokens (default: the model's)")
    vocab_multiple: int | None = _value(None, "pad the embedding to a multiple of N rows (default: the model's)")
    dropout: float | None = _value(None, "dropout probability (default: the model's)")
    bias: bool | None = _value(None, "use biases in linear layers and norms (default: the model's)")

    init_from: str | None = _value(None, "initial weights, which also set the model's shape: a Hugging Face folder "
                                         "or hub id, a run directory or a checkpoint")

    corpus: str = _value("stdlib", "stdlib, shakespeare, fineweb-edu, or a path: text, jsonl, parquet, a folder of "
                                   "shards; or a mixture with weights: A=0.7,B=0.3")
    tokenizer: str | None = _value(None, "bytes, char, gpt2, a tokenizer.json, a SentencePiece *.model, or a "
                                         "folder with one of these (default: the tokenizer of the initial "
                                         "weights, else of the corpus)")
    text_key: str = _value("text", "JSON key, or column of a parquet file or data set, that holds a document's "
                                   "text")
    mask_documents: bool = _value(False, "attend only to tokens of the same document, in training and validation; "
                                         "documents are separated by end-of-text tokens")

    ds_config: str = _value("zero1", "parallel layout: a name in ds_configs/ or a path to a JSON file; a single "
                                     "rank uses ddp by default")
    tp: int | None = _value(None, "tensor-parallel degree (default: the ds_config's)")
    pp: int | None = _value(None, "pipeline-parallel degree (default: the ds_config's)")
    sp: int | None = _value(None, "sequence-parallel degree (default: the ds_config's)")
    shard_within: int | None = _value(None, "neighboring ranks that fsdp2 shards over, usually the ranks of a node "
                                            "(default: the ds_config's)")
    nvme_path: str | None = _value(None, "folder on each node's local disk for the files of zero3_nvme (default: "
                                         "the run directory)")
    precision: Literal["auto", "fp32", "tf32", "bf16", "bf16_autocast", "fp16", "fp16_autocast"] = _value(
        "auto", "auto is bf16 on devices that support it (bf16_autocast if the layout does not), else fp32")
    grad_accum_dtype: Literal["fp32", "bf16"] = _value(
        "fp32", "dtype in which micro-steps accumulate gradients; bf16 requires ZeRO and --precision bf16")
    reduce_dtype: Literal["fp32", "bf16"] = _value(
        "fp32", "dtype of the gradient all-reduce or reduce-scatter; bf16 requires --precision bf16")
    global_batch: int | None = _value(None, "sequences per step, over all ranks and micro-steps")
    micro_batch: int | None = _value(None, "sequences per rank and micro-step (default: 4, or from the other two)")
    accumulation: int | None = _value(None, "micro-steps per step (default: 1, or from the other two)")

    steps: int = _value(600, "optimizer steps of the whole run")
    lr: float = _value(2e-3, "peak learning rate; the default is lower for models wider than 128 and runs "
                             "under 400 steps")
    schedule: Literal["cosine", "linear", "wsd", "constant",
                      "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] = _value(
        "cosine", "learning rate after the warm-up: cosine or linear decay, wsd (warm-up, stable, "
                  "decay), constant, or DeepSpeed's scheduler of that name")
    min_lr: float | None = _value(None, "learning rate at the end of the decay (default: a tenth of the peak)")
    warmup_steps: int | None = _value(None, "warm-up steps (default: 100, or a tenth of a shorter run)")
    warmup_type: Literal["linear", "log"] = _value("linear", "shape of the warm-up")
    warmup_min_lr: float = _value(0.0, "learning rate at the start of the warm-up")
    decay_steps: int | None = _value(None, "step at which the decay ends (default: the last step)")
    wsd_decay_steps: int | None = _value(None, "steps of wsd's decay (default: a fifth of decay_steps)")
    beta1: float = _value(0.9, "AdamW's first moment decay")
    beta2: float = _value(0.95, "AdamW's second moment decay")
    eps: float = _value(1e-8, "AdamW's epsilon")
    weight_decay: float = _value(0.1, "weight decay of tensors with two or more dimensions")
    clip: float | None = _value(None, "clip gradients to this norm; 0 disables clipping (default: 1)")

    spike_norm: float = _value(0.0, "skip a step if its gradient norm exceeds X times the median of the last 128; "
                                    "0: only if it is NaN or Inf")
    spike_loss: float = _value(1.0, "a step is bad if its loss exceeds the median of the last 128 by X nats, or if "
                                    "it is skipped; 0: only if the loss is NaN or Inf, or it is skipped")
    bad_steps: int = _value(10, "consecutive bad steps after which --on-bad-steps applies")
    on_bad_steps: Literal["stop", "rollback"] = _value(
        "stop", "after too many bad steps, stop with an error, or roll back to the last checkpoint and continue "
                "with new samples")

    overfit_one_batch: bool = _value(False, "train on the first batch only, and fail if the model does not "
                                            "overfit it")

    eval_every: int = _value(100, "steps between validations; 0: at the end only")
    eval_tokens: int = _value(65536, "validation tokens, the same at each validation; 0: the whole split")
    sample_every: int = _value(0, "steps between samples of generated text; 0: at the end only")
    sample_tokens: int = _value(200, "tokens to generate for a sample; 0: no samples")
    prompt: str | None = _value(None, "prompt of the samples (default: a newline, or the corpus's first token "
                                      "if the tokenizer has no newline)")
    top_k: int = _value(50, "sample from the N most likely tokens; 0: from all")
    temperature: float = _value(1.0, "sampling temperature: the logits are divided by it")
    hellaswag: str | None = _value(None, "file of HellaSwag items to score: hellaswag_val.jsonl, plain or gzipped")
    hellaswag_every: int = _value(0, "steps between HellaSwag evaluations; 0: at the end only")
    hellaswag_items: int = _value(0, "score only the first N items; 0: all")
    save_every: int = _value(200, "steps between checkpoints; 0: at the end only, -1: none")
    keep_last: int = _value(2, "number of latest checkpoints to keep")
    keep_every: int = _value(0, "also keep the checkpoint of every N-th step permanently; 0: none")
    save_async: bool = _value(True, "write checkpoints in the background, from a copy in CPU memory")
    log_every: int = _value(50, "steps between progress lines and flushes of metrics.jsonl")

    track: str | None = _value(None, "also log to tensorboard, wandb or mlflow (or several: a,b), in the run "
                                     "directory; wandb:online and mlflow:online send to your server")
    profile: bool = _value(True, "profile Python on rank 0 in the first steady steps (pyinstrument)")
    trace_steps: int = _value(0, "steps to trace on every rank with torch.profiler, after the first few, for "
                                 "ezpz-llm explain")
    compile: bool | None = _value(None, "torch.compile the blocks (default: true on cuda, under layouts that "
                                        "compile them to one graph)")
    attention: Literal["auto", "explicit", "flash3"] = _value(
        "auto", "auto is the fastest kernel available, explicit stores all scores, flash3 is FlashAttention-3")
    loss_chunk: int | None = _value(None, "tokens whose logits are computed at once; 0: all, kept for the backward "
                                          "pass (default: chosen by vocabulary and device)")
    optimizer: OptimizerName = _value(  # noqa: RUF009
        "adamw", "; ".join(f"{name}: {optimizer.printed}" for name, optimizer in OPTIMIZERS.items()))
    z_loss: float = _value(0.0, "weight of the squared log-normalizer in the loss, such as 1e-4")
    recompute: Recompute = _value(  # noqa: RUF009
        0, "recompute activations in the backward pass: selective (all but the outputs of matmuls and attention), "
           "or N for every N-th block; 0: none")

    seed: int = _value(1337, "seed of initialization, data order, dropout and sampling")
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = _value("auto", "auto prefers an accelerator, else cpu")
    resume: str | None = _value(None, "continue a run directory or a checkpoint, with the run's settings unless "
                                      "given here; auto: continue --run-dir if it has a checkpoint, else start")
    run_dir: str | None = _value(None, "directory for all output of this run (default: runs/<name>-<stamp>)")


@dataclass(frozen=True)
class RunConfig(TrainConfig):
    """Configuration in which `plan_run` has replaced None in these fields."""

    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    compile: bool = False


FIELDS = {field.name: field for field in fields(TrainConfig)}
SECTIONS = {
    "model": "model", "corpus": "data", "ds_config": "layout, precision and batch",
    "steps": "schedule and optimizer", "spike_norm": "guards", "eval_every": "evaluation and samples",
    "save_every": "checkpoints", "log_every": "logging, profiles and traces", "compile": "compute",
    "seed": "seed, device and run directory",
}
"""Sections of `--help-all`, by the first field of each."""
_STEPS, _ZERO_OR_STEPS = Range(1, MAX_STEPS), Range(0, MAX_STEPS)
_NON_NEGATIVE = Range(0, 1e9)
RANGES = {
    **dict.fromkeys(("steps", "decay_steps", "wsd_decay_steps", "keep_last", "bad_steps", "log_every"), _STEPS),
    **dict.fromkeys(("warmup_steps", "eval_every", "sample_every", "sample_tokens", "top_k", "keep_every",
                     "hellaswag_every", "hellaswag_items", "trace_steps", "recompute",
                     "loss_chunk"), _ZERO_OR_STEPS),
    "eval_tokens": Range(0, MAX_TOKENS), "save_every": Range(-1, MAX_STEPS),
    **dict.fromkeys(("global_batch", "micro_batch", "accumulation"), Range(1, MAX_STEPS)),
    **dict.fromkeys(("tp", "pp", "sp"), Range(1, MAX_RANKS)), "shard_within": Range(2, MAX_RANKS),
    **dict.fromkeys(("lr", "eps", "temperature", "beta1", "beta2", "spike_norm", "spike_loss", "weight_decay",
                     "clip", "min_lr", "warmup_min_lr", "z_loss"), _NON_NEGATIVE),
}
"""Range of each number in a configuration. `ModelConfig` checks the numbers of the model."""

MODEL_OVERRIDES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "vocab_multiple",
                   "dropout", "bias")


# Sources of the recipes and presets. Learning rates, batches, and warm-up and decay in tokens: Brown et al. 2020
# (arXiv:2005.14165), table 2.1 and appendix B. Micro batch and intervals: the GPT-2 reproduction build-nanogpt.
# llama3-1b: batch, steps and intervals of a published run of that shape, which states no learning rate; that is
# from Touvron et al. 2023 (arXiv:2302.13971). shakespeare-char: nanoGPT's configuration; shakespeare-char-cpu: the
# CPU configuration in nanoGPT's readme; both with the tanh form of GELU (nanoGPT uses erf). wordplay: GPT-2's 124M
# shape on characters.
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
"""Default hyperparameters by model name."""

_HALF_M, _ONE_M, _G = 2**19, 2**20, 10**9
_WARMUP_TOKENS = 375_000_000


def _fineweb(model: str, micro_batch: int, *, tokens: int = 10 * _G, decay_tokens: int | None = None,
             batch_tokens: int = _HALF_M, block_size: int = 1024, **more: Any) -> dict[str, Any]:
    """Return a preset for FineWeb-Edu, whose schedule is defined in tokens. The learning rate decays to a tenth of
    its peak."""
    schedule = {} if decay_tokens is None else {"decay_steps": round(decay_tokens / batch_tokens)}
    return {
        "model": model, **RECIPES[model], "block_size": block_size, "vocab_multiple": 128, "dropout": 0.0,
        "corpus": "fineweb-edu", "tokenizer": "gpt2", "precision": "bf16_autocast", "seed": 1337,
        "global_batch": batch_tokens // block_size, "micro_batch": micro_batch,
        "steps": round(tokens / batch_tokens), "warmup_steps": round(_WARMUP_TOKENS / batch_tokens), **schedule,
        # 20 batches of 8 x 64 sequences of 1024 tokens.
        "eval_every": 250, "eval_tokens": 20 * 2**19, "save_every": 5000,
        "sample_every": 250, "sample_tokens": 32, "prompt": "Hello, I'm a language model,", **more,
    }


FINE_TUNING = {"lr": 3e-5}
"""Defaults for runs that start from trained weights."""

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
        "bias": False, "corpus": "shakespeare", "tokenizer": "char", "precision": "bf16_autocast", "seed": 1337,
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
"""Settings of complete runs. The global batch does not depend on the number of ranks; the micro-batch is an upper
limit."""

ADOPTS_VOCABULARY = ("tiny-gpt2", "tiny-llama", "tiny-qwen3", "tiny-olmo2", "shakespeare-char")
"""Small models whose `vocab_size` is set to the tokenizer's; all others keep their own."""
