"""Learning-rate schedules, by name (imports no torch).

WarmupLR, WarmupDecayLR and WarmupCosineLR compute the same learning rates as DeepSpeed's classes of these names.
DeepSpeed sets the learning rate after each step, so its first step uses the rate at the start of the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ezpz_llm.trainer.config import RunConfig

DEEPSPEEDS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
ENDLESS = ("constant", "WarmupLR")
"""Schedules that keep the peak learning rate."""


def learning_rate(step: int, config: RunConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0)."""
    return SCHEDULES[config.schedule](step, config)


def cosine(step: int, config: RunConfig) -> float:
    """Warm-up, then half a cosine from the peak to `min_lr` at `decay_steps`, then `min_lr`."""
    return _warmed_up(step, config, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


def linear(step: int, config: RunConfig) -> float:
    """Warm-up, then linear decay from the peak to `min_lr` at `decay_steps`, then `min_lr`."""
    return _warmed_up(step, config, lambda share: 1 - share)


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
    """Return the learning rate during warm-up: above its start at step 0, at the peak in its last step."""
    done, whole = float(step + 1), float(config.warmup_steps)
    if config.warmup_type == "log":
        done, whole = math.log(done + 1), math.log(whole + 1)
    return config.warmup_min_lr + (config.lr - config.warmup_min_lr) * done / whole


def _warmed_up(step: int, config: RunConfig, shape: Callable[[float], float]) -> float:
    """Return warm-up, decay or `min_lr`; `shape` maps progress of the decay (0 to 1) to a factor (1 to 0)."""
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
    """DeepSpeed's WarmupDecayLR, which decays to the learning rate at the start of the warm-up."""
    iteration, warmup = step - 1, _warmup_steps(config)
    if iteration < warmup:
        return warmup_lr(step, config)
    left = (config.decay_steps - iteration) / max(1, config.decay_steps - warmup)
    return _between(config, max(0.0, left))


def warmup_cosine_lr(step: int, config: RunConfig) -> float:
    """DeepSpeed's WarmupCosineLR, whose first step has learning rate 0 whatever the warm-up starts with."""
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
