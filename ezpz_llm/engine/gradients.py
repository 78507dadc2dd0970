"""The gradient norm and clipping of engines that hold whole gradients on every data-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model.placement import placement_of


def norm_and_clip(module: nn.Module, mesh: Mesh, clip: float, loss_scale: float = 1.0) -> Tensor:
    """Undo the loss scale and scale gradients down to a global norm of at most `clip` (0: no clipping), in place.

    Collective over the ranks that hold different parts of the model. What several of them hold counts once.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device. No host synchronisation.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]
    grads = [parameter.grad for _, parameter in named]
    norms = torch.stack(torch._foreach_norm(grads))
    if mesh.size("pp", "tp") > 1:
        counts = torch.tensor([placement_of(name, parameter).primary for name, parameter in named])
        square = (norms * counts.to(norms.device)).square().sum()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt() / loss_scale
    else:
        norm = torch.linalg.vector_norm(norms) / loss_scale
    if clip > 0:
        # The same small term as torch.nn.utils.clip_grad_norm_ and DeepSpeed have.
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        torch._foreach_mul_(grads, factor)
    elif loss_scale != 1.0:
        torch._foreach_mul_(grads, 1.0 / loss_scale)
    return norm
