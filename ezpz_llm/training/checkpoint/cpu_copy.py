"""CPU memory for copies of a rank's shard, so that training continues while a thread writes the copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ezpz_llm.training.checkpoint.writer import Shard
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.device import synchronize

_ALIGN = 64
_BLOCK = 1 << 30
"""Maximum bytes of a block, a power of two.

torch rounds pinned memory up to a power of two (github.com/pytorch/pytorch/issues/95823), so that a single tensor
for all values could take twice their size.
"""


def cpu_bytes(shard: Shard, device: torch.device) -> int:
    """Return the bytes of CPU memory that a copy of a shard takes, as allocated."""
    return sum(_block_sizes(shard, device))


def _block_sizes(shard: Shard, device: torch.device) -> list[int]:
    whole, rest = divmod(sum(map(_aligned, shard.outline.values())), _BLOCK)
    if rest and DEVICES[device.type].pins:
        rest = 1 << (rest - 1).bit_length()
    return [_BLOCK] * whole + [rest] * bool(rest)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGN) * _ALIGN


class CpuMemory:
    """CPU memory in blocks for a copy of a rank's shard.

    It is allocated for the first copy and reused for later ones, once the previous copy is written. For GPUs it is
    pinned, so that the copies are asynchronous and run at full bus speed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []

    def copy(self, shard: Shard) -> Shard:
        """Return a copy of the shard; the engine may change its tensors when this returns."""
        sizes = _block_sizes(shard, self._device)
        if sum(block.numel() for block in self._blocks) < sum(sizes):
            self._blocks = []
            pins = DEVICES[self._device.type].pins
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pins) for size in sizes]
        copies, at = [], 0
        for tensor in shard.tensors:
            values, done = tensor.detach().view(-1), 0
            for part in self._parts(at, values):
                copies.append(part.copy_(values[done:done + part.numel()], non_blocking=True))
                done += part.numel()
            at += _aligned(values)
        synchronize(self._device)
        return replace(shard, tensors=iter(copies))

    def _parts(self, at: int, values: Tensor) -> Iterator[Tensor]:
        """Yield memory for `values` (N) from byte `at` on, one part per block."""
        stop = at + values.numel() * values.element_size()
        while at < stop:
            number, offset = divmod(at, _BLOCK)
            count = min(stop - at, _BLOCK - offset)
            yield self._blocks[number][offset:offset + count].view(values.dtype)
            at += count
