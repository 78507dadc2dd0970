"""Learning-rate schedules, by name (imports no torch).

WarmupLR, WarmupDecayLR and WarmupCosineLR compute the same learning rates as DeepSpeed's classes of these names.
DeepSpeed sets the learning rate after each step, so its first step uses `warmup_min_lr`, or 0 with WarmupCosineLR.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ezpz_llm.training.trainer.config import RunConfig

DEEPSPEED_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
WITHOUT_DECAY = ("constant", "WarmupLR")
"""Schedules that stay at the peak learning rate after the warm-up."""


def learning_rate(step: int, config: RunConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0)."""
    return SCHEDULES[config.schedule](step, config)


def cosine(step: int, config: RunConfig) -> float:
    """Warm-up, then half a cosine from the peak to `min_lr` at `decay_steps`, then `min_lr`."""
    return _warm_up_then_decay(step, config, lambda progress: 0.5 * (1 + math.cos(math.pi * progress)))


def linear(step: int, config: RunConfig) -> float:
    """Warm-up, then linear decay from the peak to `min_lr` at `decay_steps`, then `min_lr`."""
    return _warm_up_then_decay(step, config, lambda progress: 1 - progress)


def constant(step: int, config: RunConfig) -> float:
    """Warm-up, then the peak learning rate."""
    return _warm_up(step, config) if step < config.warmup_steps else config.lr


def wsd(step: int, config: RunConfig) -> float:
    """Warm-up, stable, decay: the peak, then linear decay to `min_lr` over the last `wsd_decay_steps`.

    After Hu et al. 2024, arXiv:2404.06395, and Haegele et al. 2024, arXiv:2405.18392.
    """
    left, decay = config.decay_steps - step, config.wsd_decay_steps or 0
    if step < config.warmup_steps or left >= decay:
        return constant(step, config)
    return config.min_lr + (config.lr - config.min_lr) * max(0, left) / decay


def _warm_up(step: int, config: RunConfig) -> float:
    """Return the rate in warm-up, already above `warmup_min_lr` at step 0, and at the peak in the last step."""
    done, total = float(step + 1), float(config.warmup_steps)
    if config.warmup_type == "log":
        done, total = math.log(done + 1), math.log(total + 1)
    return config.warmup_min_lr + (config.lr - config.warmup_min_lr) * done / total


def _warm_up_then_decay(step: int, config: RunConfig, decay_factor: Callable[[float], float]) -> float:
    """Return the learning rate in warm-up, during decay, or `min_lr` afterwards.

    `decay_factor` maps the progress of the decay (0 to 1) to a factor (1 to 0).
    """
    if step < config.warmup_steps:
        return _warm_up(step, config)
    if step >= config.decay_steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * decay_factor(progress)


def _warmup_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupLR."""
    return _interpolate(config, _warm_up_progress(step - 1, config))


def _warmup_decay_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupDecayLR, which decays to `warmup_min_lr`."""
    iteration, warmup = step - 1, _warmup_steps(config)
    if iteration < warmup:
        return _warmup_lr(step, config)
    left = (config.decay_steps - iteration) / max(1, config.decay_steps - warmup)
    return _interpolate(config, max(0.0, left))


def _warmup_cosine_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupCosineLR, whose first step has learning rate 0 regardless of `warmup_min_lr`."""
    iteration, warmup = step - 1, _warmup_steps(config)
    if iteration < 0:
        return 0.0
    if iteration < warmup:
        return _interpolate(config, _warm_up_progress(iteration, config))
    progress = min(1.0, (iteration - warmup + 1) / max(1, config.decay_steps - warmup))
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _warmup_steps(config: RunConfig) -> int:
    return max(2, config.warmup_steps)


def _warm_up_progress(iteration: int, config: RunConfig) -> float:
    """Return the progress of DeepSpeed's warm-up, 0 to 1; its iterations begin at -1."""
    steps = _warmup_steps(config)
    if iteration < 0:
        return 0.0
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if config.warmup_type == "log" else iteration / steps


def _interpolate(config: RunConfig, progress: float) -> float:
    return config.warmup_min_lr + (config.lr - config.warmup_min_lr) * progress


SCHEDULES: dict[str, Callable[[int, RunConfig], float]] = {
    "cosine": cosine, "linear": linear, "wsd": wsd, "constant": constant,
    "WarmupLR": _warmup_lr, "WarmupDecayLR": _warmup_decay_lr, "WarmupCosineLR": _warmup_cosine_lr,
}
