"""Synthetic scaling studies that follow a known law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ezpz_llm.verify.scaling.study import Repeat

TOKENS = 256
"""Tokens in a sequence."""


def repeat(mode: str = "weak", ranks: int = 1, number: int = 0, *, ds_config: str = "ddp", nodes: int | None = None,
           micro_batch: int = 4, accumulation: int = 1, dp: int | None = None, steps: Sequence[float] = (0.1,) * 20,
           **changes: Any) -> Repeat:
    """Return a run with one rank per node."""
    nodes = ranks if nodes is None else nodes
    dp = ranks if dp is None else dp
    batch = micro_batch * accumulation * dp
    steps = tuple(steps)
    values: dict[str, Any] = {
        "point": f"{mode}-{ds_config}-n{nodes}-r{ranks}", "mode": mode, "ds_config": ds_config, "nodes": nodes,
        "ranks": ranks, "repeat": number, "global_batch": batch, "micro_batch": micro_batch,
        "accumulation": accumulation, "block_size": TOKENS, "step_times_s": steps,
        "tokens_per_second": batch * TOKENS / float(np.median(steps)), "mfu": None, "peak_device_bytes": None,
        "peak_host_bytes": 2**30, "split": None, "slowest_rank": ranks - 1, "slowest_host": f"n{nodes}",
        "first_loss": 5.5, "last_loss": 4.0, "run_dir": f"points/{mode}-{ds_config}-n{nodes}/run-{number}",
        "error": None}
    return Repeat(**{**values, **changes})


def noisy(seconds: float, rng: np.random.Generator, *, runs: float = 0.01, within: float = 0.03, steps: int = 30,
          memory: float = 0.5) -> tuple[float, ...]:
    """Return step times of a run around `seconds`, with noise between runs and correlated noise between steps."""
    own = runs * rng.standard_normal()
    kicks = rng.standard_normal(steps)
    wander = np.empty(steps)
    at = kicks[0]
    for i, kick in enumerate(kicks):
        at = memory * at + math.sqrt(1 - memory**2) * kick if i else kick
        wander[i] = at
    return tuple(float(step_s) for step_s in seconds * np.exp(own + within * wander))


Law = Callable[[str, int, float, int], float]


def study(law: Law, rng: np.random.Generator, *, modes: Sequence[str] = ("weak",),
          sizes: Sequence[int] = (1, 2, 4), repeats: int = 3, accumulation: int = 1, strong_batch: int = 64,
          ds_config: str = "ddp", **noise: float) -> list[Repeat]:
    """Return a study with one rank per node, whose true times are `law(mode, ranks, sequences, accumulation)`."""
    repeats_made = []
    for mode in modes:
        for ranks in sizes:
            steps = strong_batch // (4 * ranks) if mode == "strong" else accumulation
            true = law(mode, ranks, 4.0 * steps, steps)
            repeats_made += [repeat(mode, ranks, number, ds_config=ds_config, accumulation=steps,
                                    steps=noisy(true, rng, **noise)) for number in range(repeats)]
    return repeats_made
