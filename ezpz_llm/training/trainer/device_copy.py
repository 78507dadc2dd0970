"""Copies of samples to the device, overlapped with computation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.training.dist.backends import DEVICES


def to_device(samples: Iterable[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copy CPU tensors to the device, asynchronously from pinned memory if the device supports it.

    The copies run on their own stream. Since the CPU is ahead of the device, the next batch has arrived when the
    device finishes the current one. The current stream waits for the copies. torch keeps the pinned memory until
    the copy is done, and the copy until the current stream no longer uses it.
    """
    if not DEVICES[device.type].pins:
        return tuple(tensor.to(device, non_blocking=True) for tensor in samples)
    module, copy_stream = torch.get_device_module(device), _stream(device)
    with module.stream(copy_stream):
        # Tokens and targets are views of windows of T + 1 tokens. torch copies a view through pageable memory, even
        # if it is pinned, which blocks the CPU.
        copies = tuple(tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in samples)
    compute_stream = module.current_stream(device)
    compute_stream.wait_stream(copy_stream)
    for copy in copies:
        copy.record_stream(compute_stream)
    return copies


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)
