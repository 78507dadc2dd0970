"""AdamW as every engine uses it."""

from __future__ import annotations

from typing import Any

import torch

_FUSED = ("cuda", "xpu", "cpu", "mps")
"""Devices with a fused AdamW in every torch from 2.6 on."""


def make_adamw(groups: list[dict[str, Any]], adam: dict[str, Any], device: torch.device) -> torch.optim.AdamW:
    """Torch's AdamW over parameters on `device`, in one fused kernel where the device has it."""
    return torch.optim.AdamW(groups, fused=device.type in _FUSED, **adam)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
