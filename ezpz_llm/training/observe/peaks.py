"""Stated and measured matmul peak of a device, and the environment of a run.

Stated peaks are dense rates from the vendor. Where the vendor states the rate with structured sparsity, half of it
is listed. Devices are identified by torch's name. Unknown devices have no stated peak. Devices with a different
number of compute units than the listed part (a MIG slice, a partition, a special edition) have none either, unless
the vendor states the rate per unit.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ezpz_llm.core.base import installed
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import redact
from ezpz_llm.core.rundir.records import Device, Environment, Network
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather, all_gather_number
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_records import VARIABLES as RECORD_VARIABLES
from ezpz_llm.training.dist.device import device_memory, synchronize
from ezpz_llm.training.observe.machine_load import load_now

_PRECISIONS = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True)
class Peak:
    """Dense matmul rate of one torch device, in FLOP/s."""

    device: str
    precision: str
    flops: float
    source: str


@dataclass(frozen=True)
class _Part:
    pattern: str
    units: int  # SMs, CUs, or vector engines of one torch device
    teraflops: Mapping[str, float]
    source: str
    scales: bool = False  # the vendor states the rate per compute unit, so it is known for parts of other sizes


def _rates(half: float, tf32: float, fp32: float) -> dict[str, float]:
    return {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

_PARTS = (
    # The A800 and H800 are an A100 and an H100 with slower links and, from Hopper on, a lower float64 rate.
    _Part(r"\bA[18]00\b", 108, _rates(312, 156, 19.5), _NVIDIA + "a100/"),
    _Part(r"\bA30$", 56, _rates(165, 82, 10.3), _NVIDIA + "products/a30-gpu/"),
    # The H100's tables state 1,979 (SXM), 1,671 (NVL), and 1,513 (PCIe; data sheet of 2022) with sparsity.
    _Part(r"\bH[18]00 PCIe\b", 114, _rates(756, 378, 51), "NVIDIA H100 Tensor Core GPU data sheet, PCIe column"),
    _Part(r"\bH100 NVL\b", 132, _rates(835, 417, 60), _NVIDIA + "h100/"),
    # A name without a suffix, or with the memory size, is an SXM module.
    _Part(r"\bH[18]00($| \d+GB\b| SXM)|\bGH200\b", 132, _rates(989, 494, 67), _NVIDIA + "h100/"),
    _Part(r"\bH20(-3e)?$", 78, _rates(148, 74, 44), "NVIDIA H20 specification"),
    _Part(r"\bH200 NVL\b", 132, _rates(835, 417, 60), _NVIDIA + "h200/"),
    _Part(r"\bH200$", 132, _rates(989, 494, 67), _NVIDIA + "h200/"),
    # The table of Blackwell parts states 4,500 for a GPU of an HGX B200 (36,000 for the eight of an HGX B300) and
    # 5,000 for a GPU of a GB200, with sparsity.
    _Part(r"\bB200\b", 148, _rates(2250, 1100, 75), _NVIDIA + "hgx/"),
    _Part(r"\bB300\b", 148, _rates(2250, 1125, 75), _NVIDIA + "hgx/"),
    _Part(r"\bGB200\b", 148, _rates(2500, 1250, 80), _NVIDIA + "gb200-nvl72/"),
    # Volta's tensor cores support only fp16, and there is no TF32.
    _Part(r"\bV100-SXM2\b", 80, {"fp16": 125, "fp32": 15.7}, _NVIDIA + "v100/"),
    _Part(r"\bV100-PCIE\b", 80, {"fp16": 112, "fp32": 14}, _NVIDIA + "v100/"),
    _Part(r"\bL40S\b", 142, _rates(362, 183, 91.6), _NVIDIA + "l40s/"),
    _Part(r"\bL4\b", 58, _rates(121, 60, 30.3), _NVIDIA + "l4/"),
    _Part(r"\bA40\b", 84, _rates(149.7, 74.8, 37.4), _NVIDIA + "a40/"),
    _Part(r"\bRTX A6000$", 84, _rates(154.8, 77.4, 38.7), "NVIDIA GA102 GPU architecture white paper, RTX A6000"),
    _Part(r"\bRTX 6000 Ada Generation$", 142, _rates(364.2, 182.1, 91.1),
          "NVIDIA RTX 6000 Ada Generation data sheet (1,457 in FP8 with sparsity)"),
    # Rate with fp32 accumulation. fp16 accumulation is twice as fast, but torch does not use it.
    _Part(r"\bRTX 3090$", 82, _rates(71, 35.6, 35.6), "NVIDIA GA102 GPU architecture white paper, RTX 3090"),
    _Part(r"\bRTX 4090$", 128, _rates(165.2, 82.6, 82.6), "NVIDIA Ada GPU architecture white paper, RTX 4090"),
    _Part(r"\bRTX 5090$", 170, _rates(209.5, 104.8, 104.8),
          "NVIDIA RTX Blackwell GPU architecture white paper, RTX 5090"),
    _Part(r"\bA10\b", 72, _rates(125, 62.5, 31.2), _NVIDIA + "products/a10-gpu/"),
    # A torch device is one of the card's two dies: half of 383 (half precision) and 95.7 (fp32 matrix) for MI250X,
    # half of 362.1 and 90.5 for MI250. Some drivers report an MI250 as "MI250X / MI250"; the number of compute
    # units tells them apart.
    _Part(r"\bMI250X\b", 110, {"bf16": 191.5, "fp16": 191.5, "fp32": 47.85}, _AMD + "mi200/mi250x.html"),
    _Part(r"\bMI250\b", 104, {"bf16": 181.05, "fp16": 181.05, "fp32": 45.25}, _AMD + "mi200/mi250.html"),
    _Part(r"\bMI300A\b", 228, _rates(980.6, 490.3, 122.6), _AMD + "mi300/mi300a.html"),
    _Part(r"\bMI300X\b", 304, _rates(1307.4, 653.7, 163.4), _AMD + "mi300/mi300x.html"),
    _Part(r"\bMI325X\b", 304, _rates(1307.4, 653.7, 163.4), _AMD + "mi300/mi325x.html"),
    # This generation does not support TF32.
    _Part(r"\bMI355X\b", 256, {"bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3}, _AMD + "mi350/mi355x.html"),
    # One tile has 512 vector engines (8 per Xe core) at 1.6 GHz, with 4096 bf16/fp16 and 2048 TF32 (matrix engine)
    # and 256 fp32 (vector) operations per clock per Xe core. Some systems have tiles with 448 vector engines, and
    # torch may show two tiles as one device.
    _Part(r"\bData Center GPU Max 1550\b", 512, _rates(419.4, 209.7, 26.2),
          "Intel Data Center GPU Max Series Technical Overview (operations per clock); Intel ARK 232873 (clock)",
          scales=True),
    # One tile has 448 vector engines at 1.55 GHz.
    _Part(r"\bData Center GPU Max 1100\b", 448, _rates(355.5, 177.8, 22.2),
          "Intel Data Center GPU Max Series Technical Overview (operations per clock); Intel ARK 232876 (clock)",
          scales=True),
)


def find_peak(name: str, precision: str, units: int | None = None) -> Peak | None:
    """Return the stated peak of a device by its torch name; None if it is unknown.

    Args:
        units: number of compute units that the device reports (multiprocessors, or vector engines on an Intel GPU).

    Raises:
        ValueError: the precision is not in PRECISIONS.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: one of {', '.join(_PRECISIONS)}")
    for part in _PARTS:
        share = 1.0 if units is None else units / part.units
        if not re.search(part.pattern, name) or "MIG" in name or not (share == 1.0 or part.scales):
            continue
        if precision not in part.teraflops:
            return None
        return Peak(name, precision, part.teraflops[precision] * 1e12 * share, part.source)
    return None


def peak_flops(device: torch.device, precision: str) -> Peak | None:
    """Return the stated dense matmul peak of `device` in `precision`; None for a CPU or an unknown device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return find_peak(properties.name, precision, properties.multi_processor_count)
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return find_peak(properties.name, precision, properties.gpu_eu_count)
    return None


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST, _LARGEST = 256, 8192
_MIN_BURST_S = 0.01
"""Duration of a burst of matmuls above which the overhead of kernel launches and synchronization is negligible."""
_BUDGET_S = 0.1
_MAX_SAMPLES = 5
_AGREE = 0.9
"""Two successive samples above this fraction of the best sample are assumed to be undisturbed."""
_MAX_BURSTS = 20


@dataclass(frozen=True)
class Ceiling:
    """Measured matmul peak: median over ranks of the best rate in FLOP/s, with all ranks running at once.

    `size` is the size of rank 0's square matrices.
    """

    flops: float
    precision: str
    size: int
    slowest_rank: int
    slowest_flops: float


def measure_ceiling(dist: Dist, precision: str) -> Ceiling:
    """Measure the matmul peak on all ranks at once, usually for 0.2 s. Collective.

    Ranks that share a node's cores slow each other down, as in training. Frees the device memory it used, resets
    the peak memory statistics, and does not change random states.

    Args:
        precision: precision of the run. fp32 matmuls use TF32 if the process has enabled it.
    """
    dist.barrier()
    flops, size = best_sample(dist.device, _DTYPES.get(precision, torch.float32))
    rates = all_gather_number(dist, flops)
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return Ceiling(statistics.median(rates), precision, size, slowest, rates[slowest])


def best_sample(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Return the best of up to five samples of `fastest_product`. Stops once two successive samples agree; one
    sample is not enough, since other programs can occupy the cores during a whole sample."""
    samples = [fastest_product(device, dtype)]
    while len(samples) < _MAX_SAMPLES:
        samples.append(fastest_product(device, dtype))
        if samples[-1][0] > _AGREE * max(samples)[0] and samples[-2][0] > _AGREE * max(samples)[0]:
            break
    return max(samples)


def fastest_product(device: torch.device, dtype: torch.dtype, budget_s: float = _BUDGET_S) -> tuple[float, int]:
    """Return the best rate of square matmuls on `device` in FLOP/s, and the matrix size that reached it.

    Doubles the size while the next size is expected to take at most a fifth of the budget, then repeats the last
    size until the budget is spent or _MAX_BURSTS is reached.
    """
    # The first matmul initializes the library, which may take longer than the budget.
    _time_matmuls(_operands(device, dtype, _SMALLEST), 1)
    deadline = time.perf_counter() + budget_s
    best, size = (0.0, 0), _SMALLEST
    while True:
        operands = _operands(device, dtype, size)
        _time_matmuls(operands, 1)  # loads the kernel
        seconds = _time_matmuls(operands, 1)
        best = max(best, (_flops(size) / seconds, size))
        if size == _LARGEST or 8 * seconds > budget_s / 5 or time.perf_counter() > deadline:
            break
        size *= 2
    count = max(1, round(min(_MIN_BURST_S, budget_s / 5) / seconds))
    for _ in range(_MAX_BURSTS):
        best = max(best, (count * _flops(size) / _time_matmuls(operands, count), size))
        if time.perf_counter() > deadline:
            break
    del operands
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
    return best


def _flops(size: int) -> float:
    return 2.0 * size ** 3


def _operands(device: torch.device, dtype: torch.dtype, size: int) -> Operands:
    """Return two random matrices and a buffer for their product.

    Zeros would draw less power, so some devices would run faster than on real data.
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def _time_matmuls(operands: Operands, count: int) -> float:
    """Return the seconds that `count` matmuls take."""
    left, right, product = operands
    synchronize(left.device)
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(left, right, out=product)
    synchronize(left.device)
    return time.perf_counter() - began


_PACKAGES = ("ezpz_llm", "torch", "deepspeed", "numpy", "mpi4py", "tiktoken", "safetensors")

_VARIABLE_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "MPICH_", "I_MPI_", "OMPI_MCA_", "GLOO_",
    "DS_", "PYTORCH_", "TORCH_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_",
    "ONEAPI_DEVICE_SELECTOR", "EZPZ_LLM_")
"""Prefixes of environment variables that affect the speed or the results of a run."""


def run_environment(dist: Dist) -> Environment:
    """Return the environment of a run, for run.json. Collective.

    It consists of versions, hostnames, device, load, and the variables that affect the run's speed or results.
    Secrets are redacted.
    """
    network = None if dist.network is None else as_plain(dist.network)
    hosts, networks = zip(*all_gather(dist, (socket.gethostname(), network)), strict=True)
    return Environment(
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        platform=platform.platform(),
        hosts=list(dict.fromkeys(hosts)),
        world_size=dist.world_size,
        rank_source=dist.info.source,
        backend=dist.backend,
        network=choose_network(networks, several_nodes=len(set(hosts)) > 1),
        device=_device(dist.device),
        load=load_now(),
        threads=torch.get_num_threads(),
        variables=redact({name: value for name, value in sorted(os.environ.items())
                          if name.startswith(_VARIABLE_PREFIXES) and name not in RECORD_VARIABLES}))


def choose_network(networks: Sequence[dict[str, Any] | None], several_nodes: bool) -> Network | None:
    """Return the network of the first rank that fell back to TCP, else that of rank 0, from those of all ranks.

    On a single node, collectives use no network, so that TCP is no loss.
    """
    chosen = [Network(**network) for network in networks if network is not None]
    if not chosen:
        return None
    if not several_nodes:
        return replace(chosen[0], unused=[])
    return next((network for network in chosen if network.unused), chosen[0])


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # includes the build (+cpu, +cu128), which the package's metadata may lack
    return installed(package)


def _device(device: torch.device) -> Device:
    is_accelerator = bool(DEVICES[device.type].own)
    return Device(
        type=device.type, cpus=len(os.sched_getaffinity(0)),
        name=torch.get_device_module(device).get_device_name(device) if is_accelerator else _processor(),
        memory_bytes=device_memory(device) if is_accelerator else None)


def _processor() -> str:
    """Return the CPU's model name, or the architecture if /proc/cpuinfo does not name the model (as on Arm)."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
