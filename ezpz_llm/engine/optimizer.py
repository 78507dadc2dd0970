"""AdamW as every engine uses it."""

from __future__ import annotations

from typing import Any

import torch


def make_adamw(groups: list[dict[str, Any]], adam: dict[str, Any], fused: bool = True) -> torch.optim.AdamW:
    """Torch's AdamW, in one fused kernel unless that is not wanted."""
    return torch.optim.AdamW(groups, fused=fused, **adam)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
