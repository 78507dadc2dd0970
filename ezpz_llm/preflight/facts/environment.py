"""The part of a rank's environment that changes how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ezpz_llm.launch.devices import MASKS, visible_devices
from ezpz_llm.rundir import redact

_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HSA_XNACK")
_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "GLOO_", "MPICH_", "TORCH_NCCL_", "PYTORCH_")


def environment_facts(env: Mapping[str, str]) -> dict[str, Any]:
    """`environment`: what should agree between nodes. `masks`: visible devices, which rightly differ between ranks.
    `devices`: the accelerators that are visible by mask or driver, and how many the driver has `installed`. Secrets
    are redacted."""
    devices = visible_devices(env)
    return {
        "environment": redact({name: env[name] for name in sorted(env)
                               if name in _NAMES or name.startswith(_PREFIXES)}),
        "masks": {name: env[name] for name in (*MASKS, "ONEAPI_DEVICE_SELECTOR") if name in env},
        "devices": {"ids": list(devices.ids), "source": devices.source, "installed": len(visible_devices({}).ids)},
    }
