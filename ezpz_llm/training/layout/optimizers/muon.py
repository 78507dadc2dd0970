"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of blocks, AdamW for the rest.

The momentum of a matrix is orthogonalized, and scaled to the root mean square of AdamW's updates (Liu et al. 2025,
arXiv:2502.16982), so that AdamW's learning rates and weight decays suit Muon. Only the momentum is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import Optimizer

if TYPE_CHECKING:
    import torch

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in an iteration. Five bring singular values between 0.001 and 1 close to 1."""
_ITERATIONS = 5


@dataclass(frozen=True)
class _Muon(Optimizer):

    def unsupported_reason(self, layout: Layout) -> str | None:
        """Return the reason why tiled layers are not supported, or None."""
        if not layout.zero.tiled:
            return None
        return "muon orthogonalizes whole matrices, but the tiles of a layer may be stepped one after another"

    def needs_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True for the matrices of blocks."""
        return _is_block_matrix(name, len(shape))

    def state_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return only the momentum for a matrix of a block, both moments for other parameters."""
        return {"exp_avg": self.state["exp_avg"]} if _is_block_matrix(name, len(shape)) else self.state

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build the optimizer, with separate groups for the matrices of blocks.

        The engine sets its attribute `matrices`. With separate groups, a flat partition of ZeRO has only matrices,
        or none.
        """
        import torch
        from torch.optim.adamw import adamw

        class Muon(torch.optim.Optimizer):
            """Optimizer whose groups have either only matrices of blocks or only other parameters."""

            matrices: Any

            @torch.no_grad()
            def step(self) -> None:
                """Update the parameters that have gradients."""
                for group in self.param_groups:
                    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                    for parameter in parameters:
                        if not self.state[parameter]:
                            MUON.init_state(self, group, parameter)
                    step = self._step_matrices if group["is_matrices"] else self._step_others
                    step(parameters, group)

            def _step_matrices(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
                """Update matrices, or partitions of several."""
                directions = {}
                for parameter in parameters:
                    state, gradient = self.state[parameter], parameter.grad
                    state["step"] += 1
                    momentum = state["exp_avg"].lerp_(gradient, 1 - _MOMENTUM)
                    directions[parameter] = gradient.lerp(momentum, _MOMENTUM)  # Nesterov's
                self.matrices.apply(_orthogonalized, directions)
                for parameter, direction in directions.items():
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

            def _step_others(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
                states = [self.state[parameter] for parameter in parameters]
                beta1, beta2 = group["betas"]
                adamw(parameters, [parameter.grad for parameter in parameters],
                      [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
                      [state["step"] for state in states], fused=fused, amsgrad=False, maximize=False, beta1=beta1,
                      beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"])

        return Muon([part for group in groups for part in _split(group)], settings)

    def init_state(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Create zero-initialized state: without the second moment for matrices."""
        import torch

        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for kind in ("exp_avg",) if group["is_matrices"] else self.state:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments that the parameter has."""
        return {kind: value for kind, value in optimizer.state[parameter].items() if kind in self.state}


def _is_block_matrix(name: str, dimensions: int) -> bool:
    return name.startswith("transformer.h.") and dimensions == 2


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group for the matrices of blocks in a group, then one for its other parameters, unless empty."""
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in zip(group["names"], group["params"], strict=True):
        parts[_is_block_matrix(name, parameter.dim())].append(parameter)
    return [{"params": params, "is_matrices": is_matrices, "weight_decay": group["weight_decay"]}
            for is_matrices, params in parts.items() if params]


def _orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return the approximate nearest semi-orthogonal matrix, times 0.2 sqrt(max(rows, columns)), in fp32."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        squares = x @ x.T
        x = first * x + (third * squares + fifth * squares @ squares) @ x
    x = x * (0.2 * max(matrix.shape) ** 0.5)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


MUON = _Muon("muon", "Muon (AdamW for embeddings, head, norms and biases)", {"exp_avg": 4, "exp_avg_sq": 4})
