"""AdamW as every engine uses it."""

from __future__ import annotations

from typing import Any

import torch

from ezpz_llm.engine.eight_bit import make_adamw_8bit


def make_adamw(groups: list[dict[str, Any]], adam: dict[str, Any], fused: bool = True) -> torch.optim.Optimizer:
    """AdamW: torch's, in one fused kernel unless that is not wanted, or the one with moments in 8 bits.

    Args:
        adam: lr, betas and eps; and "kind", one of `Optimizer`, where it is not "adamw".
    """
    kind = adam.get("kind", "adamw")
    settings = {name: value for name, value in adam.items() if name != "kind"}
    if kind == "adamw_8bit":
        return make_adamw_8bit(groups, settings)
    return torch.optim.AdamW(groups, fused=fused and kind == "adamw", **settings)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
