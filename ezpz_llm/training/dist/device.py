"""Choice of a rank's device, and checks that ranks do not share devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from ezpz_llm.core.base import UserError, count_noun, print_lines, unknown_name_error
from ezpz_llm.launcher.basics.devices import MASKS, Accelerator, accelerators
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.basics.variables import DEVICES_VARIABLE, SHARED_DEVICES_VARIABLE, WARN
from ezpz_llm.training.dist.backends import DEVICES


def choose_device(asked: str | None, info: RankInfo) -> torch.device:
    """Select and return this rank's device: of the requested type, or of the best available type.

    Its index is 0 if only one device is visible (many schedulers mask the other devices), else the local rank.

    Raises:
        UserError: the type is unknown or unavailable, the node has fewer devices than ranks, or the type is "auto"
            and the node has GPUs that torch cannot use.
    """
    if asked in (None, "auto"):
        kind = _best()
        if kind == "cpu":
            reject_unusable_gpus(os.environ)
    else:
        kind = asked
    if kind not in DEVICES:
        raise unknown_name_error("device", kind, [*DEVICES, "auto"], where="--device")
    count = _count(kind)
    if count == 0:
        raise UserError(f"no {kind} device is visible to this process", where="--device",
                        instead="--device cpu, or a job that allocates devices")
    if not DEVICES[kind].own:
        return torch.device(kind)
    device = torch.device(kind, device_index(kind, count, info))
    if kind == "cuda":
        _expand_segments(os.environ)
    torch.get_device_module(device).set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until this rank's device has finished its work. Returns at once for a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def device_memory(device: torch.device) -> int | None:
    """Return the size of a device's own memory in bytes, or None if it uses CPU memory."""
    if device.type not in DEVICES or not DEVICES[device.type].own:
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def device_index(kind: str, count: int, info: RankInfo) -> int:
    """Return this rank's index among `count` visible devices.

    Raises:
        UserError: the local rank has no device, because the node has fewer devices than ranks.
    """
    if count == 1:
        return 0
    if info.local_rank >= count:
        raise UserError(f"local rank {info.local_rank} has no device: {count_noun(count, f'{kind} device')} for "
                        f"{info.local_size} ranks on this node",
                        instead=f"at most {count_noun(count, 'rank')} per node (launch --ppn {count})")
    return info.local_rank


def reject_unusable_gpus(env: Mapping[str, str], root: Path = Path("/")) -> None:
    """Check that this node has no visible GPU that torch cannot use: the run would silently use the CPU.

    A node has GPUs if its drivers or its PCI bus list some, or if launch has set `DEVICES_VARIABLE`.

    Raises:
        UserError: torch cannot use the GPU. The message names a file or the variable, and torch's build.
    """
    if any(not env[name].strip() or env[name].strip() == "-1" for name in MASKS if name in env):
        return
    found = accelerators(root)
    if torch.version.hip:
        found += [Accelerator("AMD", file) for file in root.glob("dev/kfd")]
    if found:
        vendor, where = found[0].vendor, str(found[0].file)
    elif DEVICES_VARIABLE in env:
        vendor, where = "", f"{DEVICES_VARIABLE}={env[DEVICES_VARIABLE]}, from launch"
    else:
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    has_xpu = bool(getattr(torch.version, "xpu", None)) or "+xpu" in torch.__version__
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "Intel GPUs" if has_xpu else "CPUs"
    raise UserError(f"this node has {f'an {vendor}' if vendor else 'a'} GPU that torch cannot use: torch "
                    f"{torch.__version__} is built for {build}",
                    where=f"{where}, and --device auto",
                    instead="a torch build that supports the driver (ezpz-llm doctor compares them), or --device "
                            "cpu to use the CPU intentionally")


def _expand_segments(env: MutableMapping[str, str]) -> None:
    """Set expandable_segments for the CUDA allocator, unless the user has configured the allocator.

    Gathered parameters have many sizes and would fragment fixed segments. PYTORCH_CUDA_ALLOC_CONF, the older name
    of the variable, is the only one that works in all versions: torch 2.6 does not know PYTORCH_ALLOC_CONF, and
    torch 2.9 ignores expandable_segments in it. torch reads the variable at the first allocation. Not set on ROCm,
    where allocations can hang with expandable segments.
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
    pci_ids = [getattr(properties, f"pci_{field}_id", None) for field in ("domain", "bus", "device")]
    pci = "" if None in pci_ids else "PCI " + ":".join(f"{number:0{width}x}" for number, width
                                                       in zip(pci_ids, (4, 2, 2), strict=True))
    uuid = str(getattr(properties, "uuid", None) or "")
    if not DEVICES[device.type].parts and torch.version.hip is None:
        return uuid or pci or None
    names = [name for name in (uuid, pci) if name]
    if not names:
        return None
    # Tiles and partitions of a card may report the same UUID and address. The rank's mask or the device index
    # distinguishes them; ranks with different masks that overlap are therefore not found.
    masks = [os.environ[name] for name in MASKS if name in os.environ]
    return f"{' '.join(names)} {','.join(masks)}/{device.index or 0}"


def claim_device(store: Store, host: str, kind: str, identity: str | None, rank: int) -> None:
    """Register a rank's device in the store, to detect ranks that share a device.

    Args:
        identity: result of `device_identity`; None if ranks may share the device.

    Raises:
        UserError: another rank of this node has the same device (unless SHARED_DEVICES_VARIABLE allows that), or
            another rank uses a different device type.
    """
    first = store.compare_set("device/type", "", kind).decode()
    if first != kind:
        raise UserError(f"rank {rank} on {host} uses {kind}, but other ranks use {first}", where="visible devices",
                        instead="the same type on every node: "
                                f"--device {'cpu' if 'cpu' in (first, kind) else first}")
    if identity is None:
        return
    key = f"device/{host}/{identity}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/owner", str(rank))
        return
    lower, higher = sorted((int(store.get(f"{key}/owner")), rank))
    problem = f"ranks {lower} and {higher} on {host} share one device ({identity})"
    if os.environ.get(SHARED_DEVICES_VARIABLE) != WARN:
        raise UserError(problem, instead="one rank per device (launch --ppn), or a device mask that differs for "
                                         f"each rank; {SHARED_DEVICES_VARIABLE}={WARN} for partitions of a card")
    print_lines(f"warning: {problem}", file=sys.stderr)
