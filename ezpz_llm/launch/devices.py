"""Accelerators and cores that this process may use, counted without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""What hides devices from a process, in the order in which they are believed."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Devices:
    """The accelerators that are visible here, by the names that their mask or driver gives them."""

    ids: tuple[str, ...]
    source: str


def visible_devices(env: Mapping[str, str]) -> Devices:
    """A visibility mask in `env` decides (an empty one hides all); else what the drivers list."""
    for name in MASKS:
        if (mask := env.get(name)) is not None:
            return Devices(_mask_ids(mask), name)
    if nvidia := _entries(_NVIDIA):
        return Devices(tuple(str(index) for index in range(len(nvidia))), str(_NVIDIA))
    # A topology node with gpu_id 0 is a CPU.
    amd = [node for node in _entries(_AMD) if _read(node / "gpu_id") not in ("", "0")]
    if amd:
        return Devices(tuple(str(index) for index in range(len(amd))), str(_AMD))
    return Devices((), "no accelerator's driver found")


def _mask_ids(mask: str) -> tuple[str, ...]:
    ids = []
    for word in mask.split(","):
        word = word.strip()
        # CUDA stops reading at the first index that names no device; -1 is the usual way to hide all.
        if not word or word.startswith("-"):
            break
        ids.append(word)
    return tuple(ids)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on, from its own mask."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_ranges(cores: tuple[int, ...]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8)."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
