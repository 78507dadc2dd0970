"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) as an optimizer of another package, in one file.

Momentum is orthogonalized for the matrices of blocks and scaled to the size of AdamW's updates (Liu et al. 2025,
arXiv:2502.16982); AdamW steps all other parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.optimizers import Optimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for whole matrices, or for ZeRO's flat partitions of them, which it gathers in each step."""

    def unsupported_reason(self, layout: Layout) -> str | None:
        """Reject layouts that shard each matrix, or whose ranks hold parts of different matrices."""
        if layout.tp == layout.pp == 1 and layout.shard_stage() < 3:
            return None
        return ("muon needs every matrix whole, or in flat partitions over all ranks (ddp, ZeRO 1 and 2); "
                f"{layout.name} distributes matrices in another way")

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build the optimizer, with separate groups for the matrices of blocks."""
        import torch

        class Steps(torch.optim.Optimizer):
            """Optimizer of groups with matrices, which have "shapes", and of other groups."""

            @torch.no_grad()
            def step(self) -> None:  # type: ignore[override]
                """Update the parameters by their gradients."""
                for group in self.param_groups:
                    directions = self.orthogonal(group) if "shapes" in group else self.adaptive(group)
                    for parameter, direction in zip(group["params"], directions, strict=True):
                        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

            def moments(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
                """Return the state of a parameter after adding its gradient to the moments."""
                if not self.state[parameter]:
                    MUON.init_state(self, group, parameter)
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                return state

            def adaptive(self, group: dict[str, Any]) -> list[torch.Tensor]:
                """Return AdamW's updates."""
                updates = []
                for parameter in group["params"]:
                    state = self.moments(group, parameter)
                    first, second = (1 - beta ** state["step"] for beta in group["betas"])
                    scale = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                    updates.append(state["exp_avg"] / first / scale)
                return updates

            def orthogonal(self, group: dict[str, Any]) -> list[torch.Tensor]:
                """Return orthogonalized momentum, for whole matrices or for this rank's part of all of them."""
                parts = [self.moments(group, parameter)["exp_avg"] for parameter in group["params"]]
                if [part.shape for part in parts] == group["shapes"]:
                    return [_orthogonalized(part) for part in parts]
                (part,), size = parts, torch.distributed.get_world_size()
                flat = part.new_empty(size * part.numel())
                torch.distributed.all_gather_into_tensor(flat, part)
                start = 0
                for shape in group["shapes"]:
                    matrix = flat[start:start + shape.numel()].view(shape)
                    matrix.copy_(_orthogonalized(matrix))
                    start += shape.numel()
                return [flat.view(size, -1)[torch.distributed.get_rank()]]

        return Steps([part for group in groups for part in _split(group)], settings)


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group's matrices of blocks with their shapes, then its other parameters."""
    named = list(zip(group["names"], group["params"], strict=True))
    matrices = [parameter for name, parameter in named if ".h." in name and parameter.dim() == 2]
    others = [parameter for name, parameter in named if not (".h." in name and parameter.dim() == 2)]
    parts: list[dict[str, Any]] = [{"params": matrices, "shapes": [matrix.shape for matrix in matrices]},
                                   {"params": others}]
    return [{**part, "weight_decay": group["weight_decay"]} for part in parts if part["params"]]


def _orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return the approximate nearest orthogonal matrix, by five Newton-Schulz iterations, times 0.2 sqrt(size)."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        squares = x @ x.T
        x = 3.4445 * x + (2.0315 * squares @ squares - 4.7750 * squares) @ x
    x = x * (0.2 * max(matrix.shape) ** 0.5)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


MUON = Muon("muon", "Muon (kellerjordan.github.io/posts/muon)", {"exp_avg": 4, "exp_avg_sq": 4})
