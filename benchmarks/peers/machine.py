"""Hardware and versions used in the comparison."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("ezpz_llm", "torch", "numpy", "deepspeed", "transformers", "accelerate")


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return {
        "processor": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), None),
        "cores": len(os.sched_getaffinity(0)),
        "bf16": sorted(flag for flag in flags if "bf16" in flag),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}}


def own_precision() -> str:
    """Return the precision of `--precision auto` on this machine: fp32 on a CPU without bf16 instructions."""
    import torch

    from ezpz_llm.training.engine.precision import native_precision
    from ezpz_llm.training.layout.layout import Layout

    return "fp32" if native_precision(torch.device("cpu"), Layout("ddp", "ddp")) == "fp32" else "bf16"


def state_of(folder: Path, main: str) -> str:
    """Return a checkout's commit, or the hash of its main file if it is not a git repository."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True,
                          check=False)
    if done.returncode == 0:
        return f"commit {done.stdout.strip()}"
    return f"sha256 of {main} {hashlib.sha256((folder / main).read_bytes()).hexdigest()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
