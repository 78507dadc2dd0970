"""Learning rates of a run: its peak and its schedule, where the user has not set them (imports no torch)."""

from __future__ import annotations

import math
from dataclasses import replace

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout.ds_config_blocks import COS_MIN_RATIO
from ezpz_llm.training.layout.value_source import Origin, ValueSource
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.trainer.config import PRESETS, RANGES, RECIPES, RunConfig
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.schedule import DEEPSPEED_SCHEDULES, WITHOUT_DECAY

_PEAK_WIDTH, _PEAK_STEPS = 128, 400
"""The default peak learning rate is for models up to this width, and for runs of at least this many steps."""


def with_peak_lr(options: Options, model: ModelConfig) -> Options:
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


def with_schedule(options: Options) -> Options:
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


def check_schedule(config: RunConfig, options: Options) -> None:
    """Check the learning rates and lengths of a complete schedule.

    Raises:
        UserError: a rate would move in the wrong direction, the warm-up and decay do not fit, or DeepSpeed's
            schedule has no warm-up.
    """
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
