"""Which device a rank computes on, and the backend that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.launch.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store


def choose_device(asked: str | None, info: RankInfo) -> torch.device:
    """The device of this rank: of the type asked for, or the best there is.

    One visible device is device 0 (schedulers often show each rank its own); otherwise the local rank counts.

    Raises:
        UserError: an unknown type, none of that type, or fewer devices than ranks on this host.
    """
    kind = _best() if asked in (None, "auto") else asked
    if kind not in DEVICES:
        raise unknown("device", kind, [*DEVICES, "auto"], where="--device")
    count = _count(kind)
    if count == 0:
        raise UserError(f"no {kind} device is visible to this process", where="--device",
                        instead="--device cpu, or a reservation with devices")
    if not DEVICES[kind].own:
        return torch.device(kind)
    device = torch.device(kind, device_index(kind, count, info))
    torch.get_device_module(device).set_device(device)
    return device


def device_index(kind: str, count: int, info: RankInfo) -> int:
    """Which of `count` visible devices is this rank's.

    Raises:
        UserError: the host runs more ranks than it has devices.
    """
    if count == 1:
        return 0
    if info.local_rank >= count:
        raise UserError(f"local rank {info.local_rank} has no device: {count} {kind} devices for {info.local_size} "
                        "ranks on this host", instead=f"at most {count} ranks a host (launch --ppn {count})")
    return info.local_rank


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
    """What tells this physical device from its neighbours; None where ranks may share it, or torch cannot tell."""
    if not DEVICES[device.type].own:
        return None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    if uuid := getattr(properties, "uuid", None):
        return str(uuid)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in place else "PCI {:04x}:{:02x}:{:02x}".format(*place)


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
