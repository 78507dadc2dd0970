"""The learning rate of a step, by the schedule's name (imports no torch).

cosine, linear, wsd and constant are the trainer's own; WarmupLR, WarmupDecayLR and WarmupCosineLR compute what
DeepSpeed's classes of these names do, step by step. DeepSpeed sets the rate after each step, so its first steps use
the rate that the warm-up begins with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ezpz_llm.trainer.config import RunConfig

DEEPSPEEDS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
ENDLESS = ("constant", "WarmupLR")
"""Schedules that keep the peak rate."""


def learning_rate(step: int, config: RunConfig) -> float:
    """The rate that optimizer step `step` (from 0) uses."""
    return SCHEDULES[config.schedule](step, config)


def cosine(step: int, config: RunConfig) -> float:
    """Half a cosine from the peak after the warm-up to the floor at `decay_steps`, and the floor from there on."""
    return _warmed_up(step, config, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


def linear(step: int, config: RunConfig) -> float:
    """A straight line from the peak after the warm-up to the floor at `decay_steps`."""
    return _warmed_up(step, config, lambda share: 1 - share)


def constant(step: int, config: RunConfig) -> float:
    """The peak rate after the warm-up."""
    return _warm_up(step, config) if step < config.warmup_steps else config.lr


def wsd(step: int, config: RunConfig) -> float:
    """Warm-up, stable, decay: the peak rate, and a straight line to the floor in the last `wsd_decay_steps`.

    After Hu et al. 2024, arXiv:2404.06395, and Haegele et al. 2024, arXiv:2405.18392.
    """
    left, decay = config.decay_steps - step, config.wsd_decay_steps or 0
    if step < config.warmup_steps or left >= decay:
        return constant(step, config)
    return config.min_lr + (config.lr - config.min_lr) * max(0, left) / decay


def _warm_up(step: int, config: RunConfig) -> float:
    """Never 0, and the peak at the last step of the warm-up."""
    done, whole = float(step + 1), float(config.warmup_steps)
    if config.warmup_type == "log":
        done, whole = math.log(done + 1), math.log(whole + 1)
    return config.warmup_min_lr + (config.lr - config.warmup_min_lr) * done / whole


def _warmed_up(step: int, config: RunConfig, shape: Callable[[float], float]) -> float:
    """The warm-up, then what `shape` makes of the share of the decay that has passed, then the floor."""
    if step < config.warmup_steps:
        return _warm_up(step, config)
    if step >= config.decay_steps:
        return config.min_lr
    share = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * shape(share)


def warmup_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupLR."""
    return _between(config, _warm_up_share(step - 1, config))


def warmup_decay_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupDecayLR: it decays to the rate that the warm-up begins with."""
    iteration, warmup = step - 1, _warmup_steps(config)
    if iteration < warmup:
        return warmup_lr(step, config)
    left = (config.decay_steps - iteration) / max(1, config.decay_steps - warmup)
    return _between(config, max(0.0, left))


def warmup_cosine_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupCosineLR, whose first step has a rate of 0 wherever the warm-up begins."""
    iteration, warmup = step - 1, _warmup_steps(config)
    if iteration < 0:
        return 0.0
    if iteration < warmup:
        return _between(config, _warm_up_share(iteration, config))
    share = min(1.0, (iteration - warmup + 1) / max(1, config.decay_steps - warmup))
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * share)) / 2


def _warmup_steps(config: RunConfig) -> int:
    return max(2, config.warmup_steps)


def _warm_up_share(iteration: int, config: RunConfig) -> float:
    """Return the progress of DeepSpeed's warm-up, 0 to 1; its iterations begin at -1."""
    steps = _warmup_steps(config)
    if iteration < 0:
        return 0.0
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if config.warmup_type == "log" else iteration / steps


def _between(config: RunConfig, share: float) -> float:
    return config.warmup_min_lr + (config.lr - config.warmup_min_lr) * share


SCHEDULES: dict[str, Callable[[int, RunConfig], float]] = {
    "cosine": cosine, "linear": linear, "wsd": wsd, "constant": constant,
    "WarmupLR": warmup_lr, "WarmupDecayLR": warmup_decay_lr, "WarmupCosineLR": warmup_cosine_lr,
}
