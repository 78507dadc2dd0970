"""Measure the matmul peak in the task's precision, with `ezpz_llm.training.observe.peaks`."""

from __future__ import annotations

import time
from typing import Any

import torch

from ezpz_llm.training.observe.peaks import fastest_product
from peers.task import Clock, Task

_SECONDS = 2.0


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Return FLOP/s, and FLOP per CPU second, of square matmuls of the fastest size."""
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    rate, size = fastest_product(torch.device("cpu"), dtype, _SECONDS)
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    products, began = 0, time.process_time()
    while (spent := time.process_time() - began) < _SECONDS:
        torch.mm(left, right)
        products += 1
    return {"flops": rate, "flops_per_cpu_second": products * 2.0 * size ** 3 / spent, "size": size}
