"""Accelerators and cores that this process may use, found without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import system_text

MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that restrict the visible devices."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")
_DEV = Path("/dev")
_DEVICE_FILES = ("nvidia", "kfd", "accel", "davinci", "hl", "mlu", "neuron")
"""Prefixes of device files of accelerators in /dev, including those that launch does not support."""
_COMMON_DEVICE_FILES = {"dri": "libze_intel_gpu.so.1", "dxg": "libcuda.so.1"}
"""Device files that most laptops have too, with the library that computing on the device requires."""
_LIBRARY_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib")
_INSTINCT = ("90008", "90010", "90400", "90401", "90402", "90500")
"""AMD's architectures for computing: `gfx_target_version` of MI100, MI200, MI300, and MI350, from Linux's
drivers/gpu/drm/amd/amdkfd/kfd_device.c."""
_INTEL = "0x8086"
_PONTE_VECCHIO = tuple(f"0x{number:04x}" for number in (0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC), 0x0BE0, 0x0BE1,
                                                        0x0BE5))
"""PCI ids of Intel's Data Center GPU Max, from INTEL_PVC_IDS in Linux's include/drm/intel/pciids.h."""
_PCI_PROPERTIES = ("domain", "location_id")
"""Properties of an AMD topology node that give its PCI address."""


class Devices(NamedTuple):
    """Visible accelerators: their ids in the mask, or their numbers in the driver."""

    ids: tuple[str, ...]
    source: str


def visible_devices(env: Mapping[str, str]) -> Devices:
    """Return the devices of the visibility masks in `env`, even if there are none; else those that a driver lists.

    A mask ends at the first number that the driver does not have, as in CUDA.
    ROCR_VISIBLE_DEVICES hides devices from HIP, which counts the others in HIP_VISIBLE_DEVICES or, if that is not
    set, CUDA_VISIBLE_DEVICES.
    """
    nvidia, amd = _entries(_NVIDIA), _amd_nodes()
    numbers = tuple(str(index) for index in range(len(nvidia or amd)))
    for chain in _mask_chains(env):
        if names := [name for name in chain if name in env]:
            ids = numbers or _mask_ids(env[names[0]])
            for name in names if numbers else names[1:]:
                ids = _select(ids, _mask_ids(env[name]))
            return Devices(ids, names[-1])
    return Devices(numbers, str(_NVIDIA) if nvidia else str(_AMD) if amd else "no accelerator driver found")


def gpu_driver() -> str | None:
    """Return the vendor of this node's GPU driver: "NVIDIA" or "AMD"; None if neither has a device."""
    return "NVIDIA" if _entries(_NVIDIA) else "AMD" if _amd_nodes() else None


DRIVER_SOURCES = (str(_NVIDIA), str(_AMD))
"""Values of `Devices.source` for devices that a driver lists, which ranks can see themselves."""


class Accelerator(NamedTuple):
    """Accelerator of this node: its vendor, and a file of its driver or of the PCI bus."""

    vendor: str
    file: Path


def accelerators(root: Path = Path("/")) -> list[Accelerator]:
    """Return the GPUs for computing of a node, whether or not its software can use them.

    Excludes graphics cards and integrated graphics, which the drivers of AMD and Intel also list.
    """
    nvidia = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    amd = [node for node in _entries(root / _AMD.relative_to("/"))
           if _amd_properties(node).get("gfx_target_version") in _INSTINCT]
    intel = [device for device in _entries(root / "sys/bus/pci/devices")
             if system_text(device / "vendor").strip() == _INTEL
             and system_text(device / "device").strip() in _PONTE_VECCHIO]
    return [Accelerator(vendor, file) for vendor, files in (("NVIDIA", nvidia), ("AMD", amd), ("Intel", intel))
            for file in files]


def has_no_accelerator(env: Mapping[str, str]) -> bool:
    """Return True if this node certainly has no usable accelerator of any vendor; False if unsure."""
    visible = visible_devices(env)
    if visible.ids:
        return False
    names = {entry.name for entry in _entries(_DEV)}
    if visible.source == "CUDA_VISIBLE_DEVICES":
        names = {name for name in names if not name.startswith("nvidia")}
    places = (*env.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_LIBRARY_PLACES)
    return not any(name.startswith(_DEVICE_FILES) for name in names) and not any(
        name in names and any(os.path.exists(os.path.join(place, library)) for place in places)
        for name, library in _COMMON_DEVICE_FILES.items())


def device_addresses() -> tuple[str, ...]:
    """Return the PCI addresses ("0000:c1:00.0") of this node's accelerators, in the order of their numbers."""
    if nvidia := _entries(_NVIDIA):
        return tuple(entry.name.lower() for entry in nvidia)
    return tuple(_amd_address(node) for node in _amd_nodes())


def _amd_nodes() -> list[Path]:
    # A topology node with gpu_id 0 is a CPU. Sort by number: node 10 comes after node 9.
    return sorted((node for node in _entries(_AMD) if system_text(node / "gpu_id").strip() not in ("", "0")),
                  key=lambda node: int(node.name))


def _amd_address(node: Path) -> str:
    values = _amd_properties(node)
    domain, location = (int(values.get(name, "0")) for name in _PCI_PROPERTIES)
    # Bus, device and function are 8, 5 and 3 bits, as in the kernel's amdkfd.
    return f"{domain:04x}:{location >> 8 & 0xff:02x}:{location >> 3 & 0x1f:02x}.{location & 0x7}"


def _amd_properties(node: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in system_text(node / "properties").splitlines() if " " in line)


def _mask_ids(mask: str) -> tuple[str, ...]:
    ids = []
    for word in mask.split(","):
        word = word.strip()
        # CUDA stops at the first invalid index; -1 is the usual way to hide all devices.
        if not word or word.startswith("-"):
            break
        ids.append(word)
    return tuple(ids)


def _mask_chains(env: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield masks that apply in turn, for each vendor. The first masks that are set count."""
    hip = "HIP_VISIBLE_DEVICES"
    if gpu_driver() == "AMD":
        yield "ROCR_VISIBLE_DEVICES", hip if hip in env else "CUDA_VISIBLE_DEVICES"
    yield from (("CUDA_VISIBLE_DEVICES",), ("ROCR_VISIBLE_DEVICES", hip), ("ZE_AFFINITY_MASK",))


def _select(ids: tuple[str, ...], mask: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices that `mask` selects, by position in `ids` or by UUID; those up to an invalid position."""
    selected = []
    for word in mask:
        if word.isdigit() and int(word) >= len(ids):
            break
        selected.append(ids[int(word)] if word.isdigit() else word)
    return tuple(selected)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def usable_cores() -> tuple[int, ...]:
    """Return the cores in the CPU affinity mask of this process."""
    return tuple(sorted(os.sched_getaffinity(0)))
