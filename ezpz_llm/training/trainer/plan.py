"""Plan of a run: configuration, model and resolved layout, validated before the run starts (imports no torch)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ezpz_llm.core.base import MAX_RANKS, MAX_STEPS, MAX_TOKENS, Range, UserError, shorten_value, user_path
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.data.corpora import prepared_folder
from ezpz_llm.training.data.document_separator import SeparatorAdvice
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.prepare import check_corpus
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import choose_tokenizer as choose_tokenizer
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.evaluate.hellaswag import read_items
from ezpz_llm.training.hf.source import Source, find_checkpoint, find_source, source_in, with_model_changes
from ezpz_llm.training.hf.tokenizer import tokenizer_argument_for
from ezpz_llm.training.hf.weight_files import check_weight_files
from ezpz_llm.training.layout.batch import SPELLINGS, option_of
from ezpz_llm.training.layout.ds_config_blocks import COS_MIN_RATIO
from ezpz_llm.training.layout.resolve import DEFAULT_MICRO_BATCH, Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import DEFAULT, NOT_FROM_USER, Origin, ValueSource
from ezpz_llm.training.model.attention import check_attention
from ezpz_llm.training.model.config import ModelConfig, differing_settings, get_model_config
from ezpz_llm.training.observe.trackers import parse_trackers
from ezpz_llm.training.trainer.checkpoint_identity import check_identity
from ezpz_llm.training.trainer.compile_choice import check_compiler, choose_compile
from ezpz_llm.training.trainer.config import (
    ADOPTS_VOCABULARY,
    MODEL_OVERRIDES,
    PRESETS,
    RECIPES,
    RunConfig,
    TrainConfig,
)
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.schedule import DEEPSPEED_SCHEDULES, WITHOUT_DECAY

SEPARATOR_ADVICE = SeparatorAdvice("use another tokenizer, such as --tokenizer bytes",
                                   "train with --mask-documents false")
_DEFAULT_CLIP = 1.0
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


@dataclass(frozen=True)
class RunPlan:
    """Validated configuration of a run, with the model and layout derived from it and the number of ranks."""

    config: RunConfig
    sources: dict[str, ValueSource]
    model: ModelConfig
    resolved: Resolved
    init_weights_source: Source | None = None
    """Source of the initial weights; None for random ones, and on resume."""
    verbose: bool = False
    """Print all settings and measurements, not only the most important ones."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks and micro-steps."""
        return self.resolved.batch.global_batch * self.model.block_size


def plan_run(options: Options, world_size: int, *, vocab_size: int | None = None,
             device: str | None = None) -> RunPlan:
    """Derive the plan of a run from its options and the number of ranks.

    Args:
        vocab_size: size of the tokenizer's vocabulary, once known; small models are set to it.
        device: type of the device, once known.

    Raises:
        UserError: a number is out of range, a name is unknown, or the batch or layout is impossible.
    """
    if world_size < 1:
        raise UserError(f"--world-size is {world_size}", where="--world-size", instead="1 or more")
    parse_trackers(options.config.track, os.environ)
    _check_ranges(options)
    model, name, init_weights_source = _choose_model(options.config, named=options.sources["model"] != DEFAULT)
    if name != options.config.model:
        options = options.set(WEIGHTS, model=name)
    options = _with_peak_lr(_with_layout(options, world_size), model)
    config = options.config
    if vocab_size is not None:
        model = _with_vocabulary(config, model, vocab_size)
    # A preset keeps its global batch on any number of ranks; its micro-batch is an upper limit.
    keeps_largest = options.origin("micro_batch") in (Origin.PRESET, Origin.RUN, Origin.RUN_TYPED)
    largest = config.micro_batch if keeps_largest else None
    resolved = resolve(Request(config.ds_config, world_size=world_size, global_batch=config.global_batch,
                               micro_batch=None if largest else config.micro_batch,
                               accumulation=config.accumulation, default_micro_batch=largest or DEFAULT_MICRO_BATCH,
                               clip=_DEFAULT_CLIP if config.clip is None else config.clip,
                               precision=config.precision, device=device or config.device, tp=config.tp,
                               pp=config.pp, sp=config.sp, shard_within=config.shard_within,
                               optimizer=config.optimizer, nvme_path=config.nvme_path,
                               grad_accum_dtype=config.grad_accum_dtype, reduce_dtype=config.reduce_dtype,
                               model=model, sources=options.sources))
    check_attention(config.attention, device or config.device, resolved.precision, model.dropout,
                    config.mask_documents)
    from_ds_config = {**resolved.adam, **({} if resolved.recompute is None else {"recompute": resolved.recompute})}
    for name, value in from_ds_config.items():
        options = options.set(resolved.sources[name], **{name: value})
    options = options.set(ValueSource(Origin.DS_CONFIG_SHARE, config.ds_config),
                          **{name: share * options.config.lr for name, share in resolved.of_peak.items()})
    _check_numbers(options.set(resolved.sources["clip"], clip=resolved.clip))
    options = _with_schedule(options)
    compiles, compile_source = choose_compile(config.compile, options.sources["compile"], device or config.device,
                                              resolved.layout, model.dropout)
    options = options.set(compile_source, compile=compiles)
    run_config = RunConfig(**vars(options.config))
    _check_schedule(run_config, options)
    return RunPlan(run_config, options.sources, model, resolved, init_weights_source, options.verbose)


def _with_layout(options: Options, world_size: int) -> Options:
    """Change the default layout of a single rank to ddp: with nothing to shard, it has less overhead.

    GPT-2 124M on an H200: half the step time of zero1; the default model on two CPU cores: 8 % more tokens/s.
    Accumulating gradients in bf16 needs ZeRO.
    """
    needs_zero = options.config.grad_accum_dtype != "fp32"
    if world_size > 1 or needs_zero or options.origin("ds_config") is not Origin.DEFAULT:
        return options
    return options.set(ValueSource(Origin.DERIVED, "a single rank"), ds_config="ddp")


_PEAK_WIDTH, _PEAK_STEPS = 128, 400
"""The default peak learning rate is for models up to this width, and for runs of at least this many steps."""


def _with_peak_lr(options: Options, model: ModelConfig) -> Options:
    """Scale the default peak learning rate by the model's width and the length of the run.

    It is inversely proportional to the width (Yang et al. 2022, arXiv:2203.03466). Short runs have too short a
    warm-up for the full rate, so it is also multiplied by sqrt(steps / 400), but at least by 0.5. In runs of 100
    steps, the loss spikes by up to 2.9 nats at a rate of 0.0028, and with none of three seeds at 0.001.
    """
    if options.origin("lr") is not Origin.DEFAULT:
        return options
    reasons, share = [], 1.0
    if model.n_embd > _PEAK_WIDTH:
        reasons.append(f"width {model.n_embd}")
        share *= _PEAK_WIDTH / model.n_embd
    if options.config.steps < _PEAK_STEPS:
        reasons.append(f"{options.config.steps} steps")
        share *= max(0.5, math.sqrt(options.config.steps / _PEAK_STEPS))
    if not reasons:
        return options
    return options.set(ValueSource(Origin.DERIVED, f"{' and '.join(reasons)}, {options.config.lr:g} at width "
                                                   f"{_PEAK_WIDTH} and {_PEAK_STEPS} steps"),
                       lr=float(f"{options.config.lr * share:.3g}"))


def _with_schedule(options: Options) -> Options:
    """Set the missing values of the schedule."""
    options = _with_min_lr(options)
    steps = options.config.steps
    for name, default in (("decay_steps", steps), ("warmup_steps", min(100, steps // 10))):
        given, source = getattr(options.config, name), options.sources[name]
        recipe = {Origin.PRESET: PRESETS, Origin.RECIPE: RECIPES}.get(source.origin, {}).get(source.detail, {})
        if given is None:
            options = options.set(ValueSource(Origin.DERIVED, "steps"), **{name: default})
        elif steps < recipe.get("steps", 0):
            # The recipe is for a longer run: keep its proportions.
            options = options.set(replace(source, scaled_to=steps),
                                  **{name: max(RANGES[name].least, given * steps // recipe["steps"])})
    if options.config.schedule == "wsd" and options.config.wsd_decay_steps is None:
        end = options.config.decay_steps or steps
        options = options.set(ValueSource(Origin.DERIVED, "decay_steps"), wsd_decay_steps=max(1, end // 5))
    return options


def _with_min_lr(options: Options) -> Options:
    """Set `min_lr`, the learning rate at the end of the schedule, which some schedules determine."""
    config = options.config
    forced = {**dict.fromkeys(WITHOUT_DECAY, config.lr), "WarmupDecayLR": config.warmup_min_lr}.get(config.schedule)
    if forced is not None and config.min_lr != forced:
        if options.origin("min_lr") is Origin.COMMAND_LINE:
            raise UserError(f"schedule {config.schedule} ends at {forced:g}, not at {config.min_lr:g}",
                            where="--min-lr", instead="use --schedule cosine, linear or wsd, or omit --min-lr")
        return options.set(ValueSource(Origin.DERIVED, f"schedule {config.schedule}"), min_lr=forced)
    if config.min_lr is not None:
        return options
    if config.schedule == "WarmupCosineLR":
        return options.set(ValueSource(Origin.FILE, f"{COS_MIN_RATIO:g} of lr, as DeepSpeed's default"),
                           min_lr=config.lr * COS_MIN_RATIO)
    # lr * 0.1 would differ in the last digit.
    return options.set(ValueSource(Origin.TENTH, "lr"), min_lr=config.lr / 10)


def _check_schedule(config: RunConfig, options: Options) -> None:
    if config.min_lr > config.lr:
        raise UserError(f"the learning rate would rise from {config.lr:g} to {config.min_lr:g}",
                        where=options.where("min_lr"), instead=f"--min-lr {config.lr / 10:g}")
    if config.warmup_min_lr > config.lr:
        raise UserError(f"in the warm-up, the learning rate would fall from {config.warmup_min_lr:g} to "
                        f"{config.lr:g}",
                        where=options.where("warmup_min_lr"), instead="--warmup-min-lr 0")
    if config.schedule in DEEPSPEED_SCHEDULES and config.warmup_steps < 1:
        raise UserError(f"DeepSpeed rejects {config.schedule} with {config.warmup_steps} warm-up steps",
                        where=options.where("warmup_steps"),
                        instead="--warmup-steps 1, or --schedule constant or cosine")
    decay = (config.wsd_decay_steps or 0) if config.schedule == "wsd" else 0
    # DeepSpeed's schedules may end within their warm-up; `setting_warnings` warns about that.
    if (config.schedule not in (*DEEPSPEED_SCHEDULES, *WITHOUT_DECAY)
            and config.warmup_steps + decay > config.decay_steps):
        too_long = f"and a decay of {decay} do not fit" if decay else "does not end"
        longer = "--decay-steps" if config.decay_steps < config.steps else "--steps"
        raise UserError(f"a warm-up of {config.warmup_steps} steps {too_long} within {config.decay_steps} steps",
                        where=options.where("warmup_steps"),
                        instead=f"--warmup-steps {config.decay_steps // 10}, or more {longer}")


def check_run(options: Options, world_size: int, device: str | None = None, *,
              renames_old_metrics: bool = False) -> RunPlan:
    """Validate a run before any rank starts: its options, layout, corpus and checkpoint to resume from.

    Args:
        device: type of the device that all ranks will have, if that is certain.
        renames_old_metrics: the run will rename existing metrics in the run directory.
    """
    options = with_tokenizer(options)
    plan = plan_run(options, world_size, vocab_size=_known_vocabulary(options.config),
                    device=device if options.config.device == "auto" else None)
    if plan.config.compile and plan.sources["compile"].origin is not Origin.DERIVED:
        check_compiler(plan.config.device, plan.sources["compile"])
    tokens = check_corpus(plan.config.corpus, plan.config.tokenizer, plan.model.block_size, plan.config.text_key,
                          decodes=plan.config.sample_tokens > 0 or plan.config.hellaswag is not None,
                          separates=SEPARATOR_ADVICE if plan.config.mask_documents else None)
    if plan.config.hellaswag is not None:
        read_items(user_path(plan.config.hellaswag), limit=1)
    folder = plan.config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if plan.init_weights_source is not None:
        check_weight_files(plan.init_weights_source)
    if plan.config.resume is not None:
        _check_resume(plan, plan.config.resume, tokens)
    elif folder and not renames_old_metrics and RunDir(Path(folder)).metrics.exists():
        raise UserError("the run directory holds another run's metrics", where=folder,
                        instead=f"another --run-dir, or --resume {folder} to continue that run")
    return plan


def _known_vocabulary(config: TrainConfig) -> int | None:
    """Return the vocabulary size if it is known before tokenization, to reject models that are too small early."""
    if config.tokenizer is not None:
        entry = choose_tokenizer(config.tokenizer).entry
        return None if entry is None else entry.vocab_size
    folder = prepared_folder(config.corpus)
    return None if folder is None else read_manifest(folder).vocab_size


def _check_resume(plan: RunPlan, where: str, tokens: TokenData | None) -> None:
    """Check the checkpoint that the run will resume from, unless its hashes turn out to be wrong on loading.

    Raises:
        UserError: there is no checkpoint, or it does not fit the run.
    """
    folder = find(Path(where))
    model = plan.model if tokens is None else _with_vocabulary(plan.config, plan.model, tokens.vocab_size)
    check_identity(plan.config, model, folder, read_state(folder), tokens)


def _invalid(options: Options, name: str, instead: str) -> UserError:
    return UserError(f"{SPELLINGS.get(name, name)} is {shorten_value(getattr(options.config, name))}",
                     instead=instead,
                     where=f"{option_of(name)} ({options.sources[name]})")


def _check_ranges(options: Options) -> None:
    for name, bounds in RANGES.items():
        if (instead := bounds.beyond(getattr(options.config, name))) is not None:
            raise _invalid(options, name, instead)


def _check_numbers(options: Options) -> None:
    config, sources = options.config, options.sources
    _check_ranges(options)
    for name in ("lr", "eps", "temperature"):
        if not getattr(config, name) > 0:
            raise _invalid(options, name, "more than 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise _invalid(options, name, "at least 0, less than 1")
    seed_for(config.seed, "init")  # raises for a seed out of range
    if config.on_bad_steps == "rollback" and config.save_every <= 0 and config.resume is None:
        raise UserError(f"with save_every {config.save_every}, there is no checkpoint to roll back to before the "
                        "run ends",
                        where=f"--on-bad-steps rollback ({sources['on_bad_steps']})",
                        instead="--save-every 200, or --on-bad-steps stop")
    if config.prompt == "" and config.sample_tokens:
        raise UserError("the prompt is empty", where=f"--prompt ({sources['prompt']})",
                        instead="--sample-tokens 0 for no sample")


def _with_vocabulary(config: TrainConfig, model: ModelConfig, vocab_size: int) -> ModelConfig:
    if config.model in ADOPTS_VOCABULARY and config.init_from is None:
        return replace(model, vocab_size=vocab_size)
    if vocab_size > model.vocab_size:
        raise UserError(f"the tokenizer has {vocab_size} tokens, more than {config.model}'s {model.vocab_size}",
                        where="--tokenizer", instead="a tokenizer with a smaller vocabulary")
    return model


WEIGHTS = ValueSource(Origin.WEIGHTS)
_NOT_SHAPE = ("block_size", "vocab_size", "vocab_multiple", "dropout", "init", "norm_eps")
"""Model fields that may differ between the initial weights and the model in `--model`."""


def _choose_model(config: TrainConfig, named: bool) -> tuple[ModelConfig, str, Source | None]:
    """Return the model, its name, and the source of its initial weights (None for random ones, and on resume).

    Args:
        named: the model's name was set, by an option, file or preset.

    Raises:
        UserError: the name is unknown, the shape is invalid, or the shape differs from that of the weights.
    """
    overrides = {name: getattr(config, name) for name in MODEL_OVERRIDES}
    if config.init_from is None:
        return get_model_config(config.model, **overrides), config.model, None
    source = _weights_to_load(config.init_from, config.resume)
    if named:
        model = get_model_config(config.model, **overrides)
        for name in differing_settings(model, source.model, _NOT_SHAPE)[:1]:
            raise UserError(f"{config.model} is not the model of these weights: {name} is {getattr(model, name)} "
                            f"in the model and {getattr(source.model, name)} in the weights",
                            where=str(source.folder), instead="omit --model: the weights set the shape")
    name = config.model if named else PurePath(config.init_from).name or str(source.folder)
    model = with_model_changes(source.model, str(source.folder), **overrides)
    return model, name, source if config.resume is None else None


def _weights_to_load(init_from: str, resume: str | None) -> Source:
    """Return the source of the run's first weights: the checkpoint on resume, else the initial weights.

    A resumed run does not need the initial weights. They may have been moved or removed.
    """
    if resume is not None:
        return source_in(find_checkpoint(Path(resume), "--resume"))
    return find_source(init_from, "--init-from")


def with_tokenizer(options: Options) -> Options:
    """Use the tokenizer of the initial weights, unless the user chose another one.

    Raises:
        UserError: the tokenizer of the weights is unknown or unsupported, or differs from the tokenizer of a preset
            or prepared corpus (see `tokenizer_argument_for`).
    """
    config = options.config
    if config.init_from is None:
        return options
    tokenizer = tokenizer_argument_for(_weights_to_load(config.init_from, config.resume), config.tokenizer,
                                       config.corpus, asked=options.origin("tokenizer") not in NOT_FROM_USER)
    return options if tokenizer == config.tokenizer else options.set(WEIGHTS, tokenizer=tokenizer)
