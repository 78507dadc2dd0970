"""A copy of a rank's part of the state in host memory, which can be written while training changes the state."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.engine.checkpoint.writer import Shard

_ALIGN = 64


def host_bytes(shard: Shard) -> int:
    """How much host memory the copy of a shard takes."""
    return sum(map(_aligned, shard.outline.values()))


def _aligned(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGN) * _ALIGN


class HostMemory:
    """The memory for such copies: taken for the first, used again for the next, when the one before is written.

    For GPUs it is page-locked: copies run at the bus's full speed, all of them at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, shard: Shard) -> Shard:
        """The shard with its tensors as they are now; the engine may change its own when this returns."""
        needed = host_bytes(shard)
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=DEVICES[self._device.type].pins)
        offsets = itertools.accumulate(map(_aligned, shard.outline.values()), initial=0)
        copies = []
        for at, tensor in zip(offsets, shard.tensors, strict=False):
            size = tensor.numel() * tensor.element_size()
            place = self._memory[at:at + size].view(tensor.dtype)
            copies.append(place.copy_(tensor.detach().view(-1), non_blocking=True))
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()
        return replace(shard, tensors=iter(copies))
