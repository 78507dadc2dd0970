"""Choice of the device that a rank computes on, and the backend that goes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from ezpz_llm.base import UserError, unknown
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.launch.devices import MASKS
from ezpz_llm.launch.ranks import RankInfo


def choose_device(asked: str | None, info: RankInfo) -> torch.device:
    """The device of this rank: of the type asked for, or the best there is.

    One visible device is device 0 (schedulers often show each rank its own); otherwise the local rank counts.

    Raises:
        UserError: an unknown type, none of that type, fewer devices than ranks on this node, or GPUs that torch
            cannot use where the choice is left to us.
    """
    if asked in (None, "auto"):
        kind = _best()
        if kind == "cpu":
            refuse_idle_gpus(os.environ)
    else:
        kind = asked
    if kind not in DEVICES:
        raise unknown("device", kind, [*DEVICES, "auto"], where="--device")
    count = _count(kind)
    if count == 0:
        raise UserError(f"no {kind} device is visible to this process", where="--device",
                        instead="--device cpu, or a reservation with devices")
    if not DEVICES[kind].own:
        return torch.device(kind)
    device = torch.device(kind, device_index(kind, count, info))
    if kind == "cuda":
        _expand_segments(os.environ)
    torch.get_device_module(device).set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device of this rank has done its work; a CPU's is done when the call returns."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def device_memory(device: torch.device) -> int | None:
    """The bytes of a device's own memory; None where it shares the host's."""
    if device.type not in DEVICES or not DEVICES[device.type].own:
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def device_index(kind: str, count: int, info: RankInfo) -> int:
    """Return this rank's index among `count` visible devices.

    Raises:
        UserError: the host runs more ranks than it has devices.
    """
    if count == 1:
        return 0
    if info.local_rank >= count:
        raise UserError(f"local rank {info.local_rank} has no device: {count} {kind} devices for {info.local_size} "
                        "ranks on this host", instead=f"at most {count} ranks a host (launch --ppn {count})")
    return info.local_rank


def refuse_idle_gpus(env: Mapping[str, str], root: Path = Path("/")) -> None:
    """Raise where this node has GPUs, no mask hides them, and torch can use none: a run would be on the CPU unseen.

    AMD's driver lists graphics of desktop processors as well, so it counts only for a torch that is built for ROCm.

    Raises:
        UserError: names the driver's files and torch's build.
    """
    if any(not env[name].strip() or env[name].strip() == "-1" for name in MASKS if name in env):
        return
    found = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    if torch.version.hip:
        found += root.glob("dev/kfd")
    if not found:
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs"
    raise UserError(f"this node has a GPU that torch cannot use: torch {torch.__version__} is built for {build}",
                    where=f"{found[0]}, and --device auto",
                    instead="a torch that fits the driver (ezpz-llm doctor compares them), or --device cpu to "
                            "train on the CPU on purpose")


def _expand_segments(env: MutableMapping[str, str]) -> None:
    """Let CUDA's allocator grow its segments, unless the user has settings of their own.

    Gathered parameters come and go in many sizes, and fixed segments between them stay unused. The older name of
    the variable is the one that every torch reads, when it first allocates: 2.6 does not know the newer, and 2.9
    ignores this setting there. On ROCm allocations can hang with it.
    """
    if torch.version.hip is None and not any(f"PYTORCH_{kind}ALLOC_CONF" in env for kind in ("", "CUDA_", "HIP_")):
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _best() -> str:
    return next(kind for kind in DEVICES if _count(kind))


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind)
    return module.device_count() if module.is_available() else 0


def device_identity(device: torch.device) -> str | None:
    """Return an identifier of the physical device; None if ranks may share it, or torch does not provide one."""
    if not DEVICES[device.type].own:
        return None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    # Ranks that see other parts of a card have another mask, or another number.
    part = f" {os.environ.get('ZE_AFFINITY_MASK', '')}/{device.index or 0}" if DEVICES[device.type].parts else ""
    if uuid := getattr(properties, "uuid", None):
        return f"{uuid}{part}"
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return None
    return "PCI " + ":".join(f"{number:0{width}x}" for number, width in zip(place, (4, 2, 2), strict=True)) + part


def claim_device(store: Store, host: str, kind: str, identity: str | None, rank: int) -> None:
    """Register a rank's device with the others', before training starts.

    Args:
        identity: what tells the device apart on its host; None where ranks may share it.

    Raises:
        UserError: another rank of this host has it already, or other ranks compute on another type of device.
    """
    first = store.compare_set("device/type", "", kind).decode()
    if first != kind:
        raise UserError(f"rank {rank} on {host} computes on {kind}, others on {first}", where="visible devices",
                        instead=f"the same on every host: --device {'cpu' if 'cpu' in (first, kind) else first}")
    if identity is None:
        return
    key = f"device/{host}/{identity}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/owner", str(rank))
        return
    one, other = sorted((int(store.get(f"{key}/owner")), rank))
    raise UserError(f"ranks {one} and {other} on {host} share one device ({identity})",
                    instead="as many ranks a host as it has devices (launch --ppn), or a mask that shows each rank "
                            "its own")
