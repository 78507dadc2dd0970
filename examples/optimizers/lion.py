"""Lion (Chen et al. 2023, arXiv:2302.06675) for `--optimizer lion`; see docs/reference/training.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import Optimizer


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion, with the learning rate, betas and weight decay of the run."""

    def unsupported_reason(self, layout: Layout) -> str | None:
        """Reject pipelines."""
        return "Lion has not been tried in a pipeline" if layout.pp > 1 else None

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        return _Lion(groups, settings)


class _Lion(torch.optim.Optimizer):

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters that have gradients; a skipped step has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    LION.init_state(self, group, parameter)
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                state["step"] += 1
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(average.lerp(parameter.grad, 1 - beta1).sign(), alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)


LION = Lion("lion", "Lion (arXiv:2302.06675)", {"exp_avg": 4})
