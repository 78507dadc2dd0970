"""Measure how fast one process reads samples from shards, in the trainer's access pattern."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.data.shards import TokenData
from peers.data import SHARDS
from peers.task import Clock, Task

_STEPS = 200


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Return tokens per second; each token is read once as input and once as target."""
    stream = TokenData.open(Path(task.data) / SHARDS).split("train")
    batches = Batches(stream, block_size=task.block_size, seed=1337, global_batch=task.global_batch,
                      micro_batch=task.global_batch, dp_rank=0, dp_size=1)
    batches.micro_batches(0)
    began, processor = time.perf_counter(), time.process_time()
    for step in range(1, _STEPS + 1):
        batches.micro_batches(step * task.global_batch)
    tokens = _STEPS * task.tokens_per_step
    return {"tokens_per_second": tokens / (time.perf_counter() - began),
            "tokens_per_cpu_second": tokens / (time.process_time() - processor)}
