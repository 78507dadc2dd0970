"""Plan of a run: configuration, model and resolved layout, validated before the run starts (imports no torch)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import UserError, shorten_value, user_path
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.data.corpora import prepared_folder
from ezpz_llm.training.data.document_separator import SeparatorAdvice
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.prepare import check_corpus
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import choose_tokenizer
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.evaluate.hellaswag import read_items
from ezpz_llm.training.hf.source import Source
from ezpz_llm.training.hf.weight_files import check_weight_files
from ezpz_llm.training.layout.batch import SPELLINGS, option_of
from ezpz_llm.training.layout.resolve import DEFAULT_MICRO_BATCH, Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import DEFAULT, Origin, ValueSource
from ezpz_llm.training.model.attention import check_attention
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.observe.trackers import parse_trackers
from ezpz_llm.training.trainer.checkpoint_identity import check_identity
from ezpz_llm.training.trainer.compile_choice import check_compiler, choose_compile
from ezpz_llm.training.trainer.config import RANGES, RunConfig, TrainConfig
from ezpz_llm.training.trainer.model_choice import WEIGHTS, choose_model, with_tokenizer, with_vocabulary
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.schedule_choice import check_schedule, with_peak_lr, with_schedule

SEPARATOR_ADVICE = SeparatorAdvice("use another tokenizer, such as --tokenizer bytes",
                                   "train with --mask-documents false")
_DEFAULT_CLIP = 1.0


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
    model, name, init_weights_source = choose_model(options.config, named=options.sources["model"] != DEFAULT)
    if name != options.config.model:
        options = options.set(WEIGHTS, model=name)
    options = with_peak_lr(_with_layout(options, world_size), model)
    config = options.config
    if vocab_size is not None:
        model = with_vocabulary(config, model, vocab_size)
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
    options = with_schedule(options)
    compiles, compile_source = choose_compile(config.compile, options.sources["compile"], device or config.device,
                                              resolved.layout, model.dropout)
    options = options.set(compile_source, compile=compiles)
    if config.recompute == "selective" and resolved.layout.zero.stage == 3:
        raise UserError("selective recomputation does not support ZeRO stage 3, whose linear layers change the "
                        "outputs that it keeps", where=f"--recompute ({options.sources['recompute']})",
                        instead="--ds-config fsdp2, or --recompute 1")
    run_config = RunConfig(**vars(options.config))
    check_schedule(run_config, options)
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
    model = plan.model if tokens is None else with_vocabulary(plan.config, plan.model, tokens.vocab_size)
    check_identity(plan.config, model, folder, read_state(folder), tokens)


def _invalid(options: Options, name: str, instead: str) -> UserError:
    return UserError(f"{SPELLINGS.get(name, name)} is {shorten_value(getattr(options.config, name))}",
                     instead=instead,
                     where=f"{option_of(name)} ({options.sources[name]})")


def _check_ranges(options: Options) -> None:
    for name, bounds in RANGES.items():
        value = getattr(options.config, name)
        if value != "selective" and (instead := bounds.beyond(value)) is not None:
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
