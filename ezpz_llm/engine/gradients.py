"""The gradient norm and clipping of engines that hold whole gradients on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def norm_and_clip(parameters: Iterable[nn.Parameter], clip: float, loss_scale: float = 1.0) -> Tensor:
    """Undo the loss scale and scale gradients down to a global norm of at most `clip` (0: no clipping), in place.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device. No host synchronisation.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / loss_scale
    if clip > 0:
        # The same small term as torch.nn.utils.clip_grad_norm_ and DeepSpeed have.
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        torch._foreach_mul_(grads, factor)
    elif loss_scale != 1.0:
        torch._foreach_mul_(grads, 1.0 / loss_scale)
    return norm
