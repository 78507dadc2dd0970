"""Environment of a run (machine, versions, threads) for run.json."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm.dist.agree import all_gather
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.rundir import redact

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist

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
        "threads": torch.get_num_threads(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    })


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # with the build (+cpu, +cu128), which the package's metadata may lack
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"type": device.type, "cpus": len(os.sched_getaffinity(0))}
    if DEVICES[device.type].own:
        module = torch.get_device_module(device)
        described["name"] = module.get_device_name(device)
        described["memory_bytes"] = module.get_device_properties(device).total_memory
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
