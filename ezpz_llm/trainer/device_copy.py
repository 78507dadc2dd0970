"""Copies of samples to the device, beside what it computes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.dist.backends import DEVICES


def to_device(samples: Iterable[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of host memory on the device, without waiting for it.

    Where copies from pinned memory go on beside the host, they have a stream of their own: the host is ahead of the
    device, so the next batch is there when the one before is done. What computes afterwards waits for the copy, on
    the device. torch keeps the pinned memory until the copy is done, and the copy until the computing stream is.
    """
    if not DEVICES[device.type].pins:
        return tuple(one.to(device, non_blocking=True) for one in samples)
    module, beside = torch.get_device_module(device), _stream(device)
    with module.stream(beside):
        moved = tuple(one.pin_memory().to(device, non_blocking=True) for one in samples)
    computing = module.current_stream(device)
    computing.wait_stream(beside)
    for one in moved:
        one.record_stream(computing)
    return moved


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)
