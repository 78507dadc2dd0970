"""torch.optim.AdamW, with and without a fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ezpz_llm.training.layout.optimizers import Optimizer

if TYPE_CHECKING:
    import torch

_FP32 = {"exp_avg": 4, "exp_avg_sq": 4}


@dataclass(frozen=True)
class _AdamW(Optimizer):
    is_known_to_deepspeed: bool = True
    is_fused: bool = True

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(groups, fused=fused and self.is_fused, **settings)


ADAMW = _AdamW("adamw", "AdamW", _FP32, can_offload=True)
_UNFUSED = _AdamW("adamw_unfused", "AdamW (unfused)", _FP32, is_fused=False)
