"""How fast the device at hand multiplies matrices: no training step is faster, whatever its vendor states."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S = 0.01
"""A burst of products that takes so long is hardly touched by what it costs to start it and to wait for it."""
_BUDGET_S = 0.15
_MOST_BURSTS = 20


@dataclass(frozen=True)
class Ceiling:
    """`flops` is the median over ranks of each one's best rate in FLOP/s, all of them multiplying at once.

    `size` is that of rank 0's square matrices; `slowest_rank` reached `slowest_flops`.
    """

    flops: float
    precision: str
    size: int
    slowest_rank: int
    slowest_flops: float

    def as_record(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)


def measure_ceiling(dist: Dist, precision: str) -> Ceiling:
    """Multiply on all ranks at once, for about a fifth of a second. A collective.

    Ranks that share a host's cores get in each other's way here as they do in training. Nothing is left in the
    device's memory, and no random state changes.

    Args:
        precision: as of the run; whether fp32 products are TF32's is the process's setting.
    """
    dist.barrier()
    flops, size = fastest_product(dist.device, _DTYPES.get(precision, torch.float32))
    rates = [flops]
    if dist.world_size > 1:
        found = torch.zeros(dist.world_size, device=dist.device)
        found[dist.rank] = flops
        torch.distributed.all_reduce(found)
        rates = found.tolist()
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return Ceiling(statistics.median(rates), precision, size, slowest, rates[slowest])


def fastest_product(device: torch.device, dtype: torch.dtype, budget_s: float = _BUDGET_S) -> tuple[float, int]:
    """The best FLOP/s of square products on `device`, and the size that reached it.

    Sizes double as long as the next one fits a fraction of the budget; the rest of it repeats the last one.
    """
    _burst(_factors(device, dtype, _SMALLEST), 1)  # sets the library up, which may take longer than the budget
    deadline = time.perf_counter() + budget_s
    best, size = (0.0, 0), _SMALLEST
    while True:
        factors = _factors(device, dtype, size)
        _burst(factors, 1)  # loads the kernel
        seconds = _burst(factors, 1)
        best = max(best, (_flops(size) / seconds, size))
        if size == _LARGEST or 8 * seconds > budget_s / 5 or time.perf_counter() > deadline:
            break
        size *= 2
    products = max(1, round(min(_LONG_ENOUGH_S, budget_s / 5) / seconds))
    for _ in range(_MOST_BURSTS):
        best = max(best, (products * _flops(size) / _burst(factors, products), size))
        if time.perf_counter() > deadline:
            break
    del factors
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
    return best


def _flops(size: int) -> float:
    return 2.0 * size ** 3


def _factors(device: torch.device, dtype: torch.dtype, size: int) -> Factors:
    """Two random matrices (of zeros a device takes less power, and some go faster) and room for their product."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def _burst(factors: Factors, products: int) -> float:
    """Seconds that so many products take."""
    left, right, product = factors
    _wait(left.device)
    began = time.perf_counter()
    for _ in range(products):
        torch.mm(left, right, out=product)
    _wait(left.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
