"""Checks of the trainer's learning rate schedules, at every step.

The trainer's own schedules warm up for W steps, the last of which has the peak, follow their curve to the floor at
step D, and stay there. DeepSpeed's schedulers set the learning rate after each step, so each step uses the rate of
the iteration before it. The first step uses the initial rate of the warm-up, or 0 under WarmupCosineLR.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

from ezpz_llm.training.trainer.config import RunConfig
from ezpz_llm.training.trainer.schedule import SCHEDULES, learning_rate

PEAK, FLOOR, _INITIAL = 4e-3, 5e-4, 1e-4
"""Learning rates at the peak, at the end, and at the start of the warm-up."""
DECAY, _WSD_DECAY = 40, 9
"""Step D at which the floor is reached, and the number of steps before D in which wsd decays."""
_WARMUPS = (0, 1, 7)
STEPS = DECAY + 5


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check of the learning rates in `ezpz_llm/training/trainer/schedule.py`."""
    if unknown := SCHEDULES.keys() - _CURVES.keys() - _DEEPSPEED_CURVES.keys():
        yield f"{', '.join(sorted(unknown))}: certify has no definition of this learning rate schedule"
    names: tuple[Any, ...] = (*_CURVES, *_DEEPSPEED_CURVES)
    shapes: tuple[Literal["linear", "log"], ...] = ("linear", "log")
    for name, warmup, shape, begin in itertools.product(names, _WARMUPS, shapes, (0.0, _INITIAL)):
        if name in _DEEPSPEED_CURVES and not warmup:
            continue  # DeepSpeed's schedulers require a warm-up
        config = RunConfig(schedule=name, lr=PEAK, min_lr=FLOOR, warmup_steps=warmup, decay_steps=DECAY,
                           wsd_decay_steps=_WSD_DECAY, warmup_type=shape, warmup_min_lr=begin)
        rate = _deepspeed_rate if name in _DEEPSPEED_CURVES else _trainer_rate
        for step in range(STEPS):
            actual, expected = learning_rate(step, config), rate(name, step, warmup, shape, begin)
            if not math.isclose(actual, expected, rel_tol=1e-12):
                yield (f"{name}, a {shape} warm-up of {warmup} steps from {begin:g}: the learning rate of step "
                       f"{step + 1} is {actual:.7g}, not {expected:.7g}")
                break


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


_CURVES = {
    # (1 + cos(pi x)) / 2 is the squared cosine of half the angle.
    "cosine": lambda step, progress: math.cos(math.pi / 2 * progress) ** 2,
    "linear": lambda step, progress: 1 - progress,
    "constant": lambda step, progress: 1.0,
    "wsd": lambda step, progress: min(1.0, max(0.0, (DECAY - step) / _WSD_DECAY)),
}
"""Height of each curve above the floor (0 to 1) at a step. `progress` is the completed share of the decay."""


def _trainer_rate(name: str, step: int, warmup: int, shape: str, begin: float) -> float:
    """Return the learning rate of a step (from 0) under one of the trainer's own schedules."""
    number = step + 1
    if number <= warmup:
        return _between(begin, PEAK, number / warmup if shape == "linear" else math.log(number + 1, warmup + 1))
    return _between(FLOOR, PEAK, _CURVES[name](step, min(1.0, (step - warmup) / (DECAY - warmup))))


_DEEPSPEED_CURVES = {
    "WarmupLR": lambda iteration, warmup, begin: PEAK,
    "WarmupDecayLR": lambda iteration, warmup, begin: _between(
        begin, PEAK, max(0.0, (DECAY - iteration) / (DECAY - warmup))),
    "WarmupCosineLR": lambda iteration, warmup, begin: _between(
        FLOOR, PEAK, (1 + math.cos(math.pi * min(1.0, (iteration - warmup + 1) / (DECAY - warmup)))) / 2),
}
"""Learning rates after the warm-up, by name."""


def _deepspeed_rate(name: str, step: int, warmup: int, shape: str, begin: float) -> float:
    """Return the learning rate of a step (from 0) under one of DeepSpeed's schedulers."""
    iteration, warmup = step - 1, max(2, warmup)
    if iteration < 0:
        return 0.0 if name == "WarmupCosineLR" else begin
    if iteration < warmup:
        return _between(begin, PEAK, iteration / warmup if shape == "linear" else math.log(iteration + 1, warmup))
    return _DEEPSPEED_CURVES[name](iteration, warmup, begin)
