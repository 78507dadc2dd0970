"""The gradient norm and clipping of engines that leave them to us."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model.placement import placement_of
from ezpz_llm.private_names import foreach_div_, foreach_norm


def norm_and_clip(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                  loss_scale: float = 1.0) -> Tensor:
    """Have the next step made on gradients without the loss scale, of a global norm of at most `clip` (0: any).

    For gradients that data-parallel ranks hold alike. Collective over the ranks that hold different parts of the
    model. What several of them hold counts once.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device. No host synchronisation.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]
    grads = [parameter.grad for _, parameter in named]
    mine = [parameter.grad for name, parameter in named if placement_of(name, parameter).primary]
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(mine)))
    if mesh.size("pp", "tp") > 1:
        square = norm.square()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt()
    norm = norm / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def divided_norm_and_clip(grads: list[Tensor], mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                          loss_scale: float = 1.0) -> Tensor:
    """The same for gradients that are divided over data-parallel ranks. Collective over them."""
    square = torch.stack(foreach_norm(grads)).square().sum()
    if mesh.size("dp", "sp") > 1:
        torch.distributed.all_reduce(square, group=mesh.group("dp", "sp"))
    norm = square.sqrt() / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def _scale(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, clip: float,
           loss_scale: float) -> None:
    """torch's fused optimizers divide as they read, which spares a pass over all gradients; for others, divide."""
    divisor = None
    if clip > 0:
        # The same small term as torch.nn.utils.clip_grad_norm_ and DeepSpeed have.
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) * loss_scale
    elif loss_scale != 1.0:
        divisor = torch.full_like(norm, loss_scale)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor
    elif divisor is not None:
        foreach_div_(grads, divisor)
