"""The learning rate of a step: linear warm-up, then a cosine to a floor."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, floor: float, warmup_steps: int, max_steps: int) -> float:
    """The rate that optimizer step `step` (from 0) uses; never 0, and `floor` from `max_steps` on."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= max_steps:
        return floor
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
