"""What a run will be, decided and validated before anything starts (imports no torch)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ezpz_llm.data.prepare import check_corpus
from ezpz_llm.engine.checkpoint import find
from ezpz_llm.engine.resolve import Resolved, resolve
from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig, get_model_config
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.trainer.config import MODEL_OVERRIDES, TrainConfig
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.presets import ADOPTS_VOCABULARY

_DEFAULT_CLIP = 1.0
_AT_LEAST = {"steps": 1, "warmup_steps": 0, "eval_every": 0, "eval_tokens": 0, "sample_every": 0,
             "sample_tokens": 0, "save_every": -1, "keep_last": 1, "log_every": 1, "trace_steps": 0, "seed": 0}


@dataclass(frozen=True)
class RunPlan:
    """A validated run: `model` and `resolved` follow from `config` and the number of ranks."""

    config: TrainConfig
    sources: dict[str, str]
    model: ModelConfig
    resolved: Resolved

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks and micro-steps."""
        return self.resolved.batch.global_batch * self.model.block_size


def plan_run(options: Options, world_size: int, *, vocab_size: int | None = None,
             device: str | None = None) -> RunPlan:
    """Decide everything that follows from the options and the number of ranks.

    Args:
        vocab_size: the tokenizer's, once known; models for trying things out adopt it.
        device: the type of the device, once known.

    Raises:
        UserError: a number out of range, an unknown name, a batch or layout that does not work out.
    """
    config, sources = options.config, dict(options.sources)
    _check_numbers(config)
    model = get_model_config(config.model, **{name: getattr(config, name) for name in MODEL_OVERRIDES})
    if vocab_size is not None:
        model = _with_vocabulary(config, model, vocab_size)
    resolved = resolve(config.ds_config, world_size=world_size, global_batch=config.global_batch,
                       micro_batch=config.micro_batch, accumulation=config.accumulation,
                       clip=_DEFAULT_CLIP if config.clip is None else config.clip, precision=config.precision,
                       device=device or config.device, sources=sources)
    config = replace(config, **resolved.adam)
    sources.update({name: resolved.sources[name] for name in resolved.adam})
    return RunPlan(_with_schedule(config, sources), sources, model, resolved)


def _with_schedule(config: TrainConfig, sources: dict[str, str]) -> TrainConfig:
    if config.min_lr is None:
        config = replace(config, min_lr=config.lr / 10)
    if config.warmup_steps is None:
        return replace(config, warmup_steps=min(100, config.steps // 10))
    if config.warmup_steps > config.steps:
        raise UserError(f"a warm-up of {config.warmup_steps} steps does not end within {config.steps} steps",
                        where=f"warmup_steps ({sources['warmup_steps']})",
                        instead=f"--warmup-steps {config.steps // 10}, or more --steps")
    return config


def check_run(options: Options, world_size: int) -> RunPlan:
    """Find what is wrong with a run before any rank starts: its numbers, layout, corpus and resume point."""
    plan = plan_run(options, world_size)
    check_corpus(plan.config.corpus, plan.config.tokenizer)
    folder = plan.config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if plan.config.resume is not None:
        find(Path(plan.config.resume))
    elif folder and RunDir(Path(folder)).metrics.exists():
        raise UserError("the run directory holds another run's metrics", where=folder,
                        instead=f"another --run-dir, or --resume {folder} to go on with that run")
    return plan


def _check_numbers(config: TrainConfig) -> None:
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{name} is {value}", where=f"--{name.replace('_', '-')}", instead=f"{least} or more")
    for name in ("lr", "eps"):
        if not getattr(config, name) > 0:
            raise UserError(f"{name} is {getattr(config, name)}", where=f"--{name}", instead="more than 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}", where=f"--{name}",
                            instead="at least 0, less than 1")


def _with_vocabulary(config: TrainConfig, model: ModelConfig, vocab_size: int) -> ModelConfig:
    if config.model in ADOPTS_VOCABULARY:
        return replace(model, vocab_size=vocab_size)
    if vocab_size > model.padded_vocab_size:
        raise UserError(f"the tokenizer has {vocab_size} tokens, more than {config.model}'s {model.vocab_size}",
                        where="--tokenizer", instead="a tokenizer with a smaller vocabulary")
    return model
