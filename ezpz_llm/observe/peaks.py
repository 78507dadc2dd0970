"""Environment of a run; matmul peak of a device, as its vendor states it (an unknown one has none) and as measured.

Where a vendor prints the rate with structured sparsity, half of it is the dense rate. Names are those that torch
reports. A device that reports another number of compute units than the stated part (a MIG slice, a partition, a
special edition) has no stated peak either.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.base import installed
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather, all_gather_number
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.device import device_memory, synchronize
from ezpz_llm.observe.machine_load import load_now
from ezpz_llm.rundir import redact

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True)
class Peak:
    """`flops` is the dense rate in FLOP/s of what torch calls one device."""

    device: str
    precision: str
    flops: float
    source: str


@dataclass(frozen=True)
class _Part:
    pattern: str
    units: int  # SMs, CUs or vector engines of one torch device
    teraflops: Mapping[str, float]
    source: str
    scales: bool = False  # the vendor states the rate per compute unit, so that parts of other sizes have one too


def _tensor(half: float, tf32: float, fp32: float) -> dict[str, float]:
    return {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

_PARTS = (
    # The 800s are the 100s with slower links and, from Hopper on, fewer products in double precision.
    _Part(r"\bA[18]00\b", 108, _tensor(312, 156, 19.5), _NVIDIA + "a100/"),
    _Part(r"\bA30$", 56, _tensor(165, 82, 10.3), _NVIDIA + "products/a30-gpu/"),
    # With sparsity the H100's tables give 1,979 (SXM), 1,671 (NVL) and 1,513 (PCIe; data sheet of 2022).
    _Part(r"\bH[18]00 PCIe\b", 114, _tensor(756, 378, 51), "NVIDIA H100 Tensor Core GPU data sheet, PCIe column"),
    _Part(r"\bH100 NVL\b", 132, _tensor(835, 417, 60), _NVIDIA + "h100/"),
    # A bare name, or one with the size of the memory, is that of an SXM module.
    _Part(r"\bH[18]00($| \d+GB\b| SXM)|\bGH200\b", 132, _tensor(989, 494, 67), _NVIDIA + "h100/"),
    _Part(r"\bH20(-3e)?$", 78, _tensor(148, 74, 44), "NVIDIA H20 specification"),
    _Part(r"\bH200 NVL\b", 132, _tensor(835, 417, 60), _NVIDIA + "h200/"),
    _Part(r"\bH200$", 132, _tensor(989, 494, 67), _NVIDIA + "h200/"),
    # With sparsity the table of Blackwell parts gives 4,500 for one GPU of an HGX B200 (36,000 for the eight of an
    # HGX B300), 5,000 for one of a GB200.
    _Part(r"\bB200\b", 148, _tensor(2250, 1100, 75), _NVIDIA + "hgx/"),
    _Part(r"\bB300\b", 148, _tensor(2250, 1125, 75), _NVIDIA + "hgx/"),
    _Part(r"\bGB200\b", 148, _tensor(2500, 1250, 80), _NVIDIA + "gb200-nvl72/"),
    # Volta's tensor cores take fp16 only, and there is no tf32.
    _Part(r"\bV100-SXM2\b", 80, {"fp16": 125, "fp32": 15.7}, _NVIDIA + "v100/"),
    _Part(r"\bV100-PCIE\b", 80, {"fp16": 112, "fp32": 14}, _NVIDIA + "v100/"),
    _Part(r"\bL40S\b", 142, _tensor(362, 183, 91.6), _NVIDIA + "l40s/"),
    _Part(r"\bL4\b", 58, _tensor(121, 60, 30.3), _NVIDIA + "l4/"),
    _Part(r"\bA40\b", 84, _tensor(149.7, 74.8, 37.4), _NVIDIA + "a40/"),
    _Part(r"\bRTX A6000$", 84, _tensor(154.8, 77.4, 38.7), "NVIDIA GA102 GPU architecture white paper, RTX A6000"),
    _Part(r"\bRTX 6000 Ada Generation$", 142, _tensor(364.2, 182.1, 91.1),
          "NVIDIA RTX 6000 Ada Generation data sheet (1,457 in FP8 with sparsity)"),
    # With sums in fp32; half-precision sums, which torch does not ask for, are twice as fast.
    _Part(r"\bRTX 3090$", 82, _tensor(71, 35.6, 35.6), "NVIDIA GA102 GPU architecture white paper, RTX 3090"),
    _Part(r"\bRTX 4090$", 128, _tensor(165.2, 82.6, 82.6), "NVIDIA Ada GPU architecture white paper, RTX 4090"),
    _Part(r"\bRTX 5090$", 170, _tensor(209.5, 104.8, 104.8),
          "NVIDIA RTX Blackwell GPU architecture white paper, RTX 5090"),
    _Part(r"\bA10\b", 72, _tensor(125, 62.5, 31.2), _NVIDIA + "products/a10-gpu/"),
    # torch's device is one of the card's two dies: half of 383 (half precision) and of 95.7 (fp32 matrix), and of
    # 362.1 and 90.5. Drivers call the smaller one "MI250X / MI250" as well.
    _Part(r"\bMI250X\b", 110, {"bf16": 191.5, "fp16": 191.5, "fp32": 47.85}, _AMD + "mi200/mi250x.html"),
    _Part(r"\bMI250\b", 104, {"bf16": 181.05, "fp16": 181.05, "fp32": 45.25}, _AMD + "mi200/mi250.html"),
    _Part(r"\bMI300A\b", 228, _tensor(980.6, 490.3, 122.6), _AMD + "mi300/mi300a.html"),
    _Part(r"\bMI300X\b", 304, _tensor(1307.4, 653.7, 163.4), _AMD + "mi300/mi300x.html"),
    _Part(r"\bMI325X\b", 304, _tensor(1307.4, 653.7, 163.4), _AMD + "mi300/mi325x.html"),
    # This generation multiplies no tf32.
    _Part(r"\bMI355X\b", 256, {"bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3}, _AMD + "mi350/mi355x.html"),
    # One tile: 512 vector engines, 8 an Xe core, at 1.6 GHz; 4096 bf16/fp16, 2048 tf32 (matrix engines) and 256
    # fp32 (vector) operations per clock and Xe core. Some systems' tiles have 448, and torch may show two as one.
    _Part(r"\bData Center GPU Max 1550\b", 512, _tensor(419.4, 209.7, 26.2),
          "Intel Data Center GPU Max Series Technical Overview (operations per clock); Intel ARK 232873 (clock)",
          scales=True),
    # One tile: 448 vector engines at 1.55 GHz.
    _Part(r"\bData Center GPU Max 1100\b", 448, _tensor(355.5, 177.8, 22.2),
          "Intel Data Center GPU Max Series Technical Overview (operations per clock); Intel ARK 232876 (clock)",
          scales=True),
)


def find_peak(name: str, precision: str, units: int | None = None) -> Peak | None:
    """The stated peak of the device that torch calls `name`.

    Args:
        units: compute units that the device reports (multiprocessors, or vector engines on an Intel GPU).

    Raises:
        ValueError: a precision that is not in PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: one of {', '.join(PRECISIONS)}")
    for part in _PARTS:
        share = 1.0 if units is None else units / part.units
        if not re.search(part.pattern, name) or "MIG" in name or not (share == 1.0 or part.scales):
            continue
        if precision not in part.teraflops:
            return None
        return Peak(name, precision, part.teraflops[precision] * 1e12 * share, part.source)
    return None


def peak_flops(device: torch.device, precision: str) -> Peak | None:
    """The stated dense peak of `device` for matrix products in `precision`; None for a CPU or an unknown device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return find_peak(properties.name, precision, properties.multi_processor_count)
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return find_peak(properties.name, precision, properties.gpu_eu_count)
    return None


# How fast the device at hand multiplies matrices: no training step is faster, whatever its vendor states.
Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S = 0.01
"""A burst of products that takes so long is hardly touched by what it costs to start it and to wait for it."""
_BUDGET_S = 0.1
_MOST_SAMPLES = 5
_AGREE = 0.9
"""Two samples in a row that are within a tenth of the best one were not disturbed."""
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


def measure_ceiling(dist: Dist, precision: str) -> Ceiling:
    """Multiply on all ranks at once, for about a fifth of a second. A collective.

    Ranks that share a host's cores get in each other's way here as they do in training. Nothing is left in the
    device's memory, and no random state changes.

    Args:
        precision: as of the run; whether fp32 products are TF32's is the process's setting.
    """
    dist.barrier()
    flops, size = best_sample(dist.device, _DTYPES.get(precision, torch.float32))
    rates = all_gather_number(dist, flops)
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return Ceiling(statistics.median(rates), precision, size, slowest, rates[slowest])


def best_sample(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """The best of up to five samples of `fastest_product`. The first two suffice if they agree: other programs can
    take the cores away for the whole of one sample."""
    samples = [fastest_product(device, dtype)]
    while len(samples) < _MOST_SAMPLES:
        samples.append(fastest_product(device, dtype))
        if samples[-1][0] > _AGREE * max(samples)[0] and samples[-2][0] > _AGREE * max(samples)[0]:
            break
    return max(samples)


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
    synchronize(left.device)
    began = time.perf_counter()
    for _ in range(products):
        torch.mm(left, right, out=product)
    synchronize(left.device)
    return time.perf_counter() - began


# Environment of a run (machine, versions, threads) for run.json.
_PACKAGES = ("ezpz_llm", "torch", "deepspeed", "numpy", "mpi4py", "tiktoken", "safetensors")

_VARIABLES = ("OMP_", "MKL_", "KMP_", "NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "MPICH_", "I_MPI_", "OMPI_MCA_",
              "GLOO_", "DS_", "PYTORCH_", "TORCH_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
              "HIP_VISIBLE_DEVICES", "ZE_", "ONEAPI_DEVICE_SELECTOR", "EZPZ_LLM_")
"""Beginnings of the names of variables that change how fast or how a run computes."""


def run_environment(dist: Dist) -> dict[str, Any]:
    """Versions, hosts, device, launcher and the variables that bear on speed; secrets redacted. A collective."""
    return redact({
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "platform": platform.platform(),
        "hosts": list(dict.fromkeys(all_gather(dist, socket.gethostname()))),
        "world_size": dist.world_size,
        "rank_source": dist.info.source,
        "backend": dist.backend,
        "device": _device(dist.device),
        "load": load_now(),
        "threads": torch.get_num_threads(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    })


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # with the build (+cpu, +cu128), which the package's metadata may lack
    return installed(package)


def _device(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"type": device.type, "cpus": len(os.sched_getaffinity(0))}
    if DEVICES[device.type].own:
        module = torch.get_device_module(device)
        described["name"] = module.get_device_name(device)
        described["memory_bytes"] = device_memory(device)
    else:
        described["name"] = _processor()
    return described


def _processor() -> str:
    """The CPU's model name where Linux tells it (Arm kernels do not), else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
