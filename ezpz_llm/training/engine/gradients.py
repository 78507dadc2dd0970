"""Gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.dist.torch_internals import foreach_div_, foreach_norm, supports_grad_scale
from ezpz_llm.training.model.parameters import placement_of


def norm_and_clip(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                  loss_scale: float = 1.0, masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({})) -> Tensor:
    """Clip gradients to a global norm of `clip` (0 disables clipping) for the next step, and undo the loss scale.

    Gradients must be equal on data-parallel ranks. Collective over the ranks with different parts of the model.
    Gradients that are replicated over these ranks count once.

    Args:
        masters: master weights, which hold the gradients of their parameters.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device, without synchronization.
    """
    named = [(placement_of(name, parameter), masters.get(parameter, parameter).grad)
             for name, parameter in module.named_parameters()]
    grads = [grad for _, grad in named if grad is not None]
    owned = [grad for at, grad in named if grad is not None and at.primary]
    norm = _total_norm(owned, next(module.parameters()).device)
    if mesh.size("pp", "tp") > 1:
        square = norm.square()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt()
    norm = norm / loss_scale
    _scale_gradients(optimizer, grads, norm, clip, loss_scale)
    return norm


def sharded_norm_and_clip(grads: list[Tensor], device: torch.device, group: ProcessGroup,
                          optimizer: torch.optim.Optimizer, clip: float, loss_scale: float = 1.0) -> Tensor:
    """Clip gradients that are sharded over `group`, as `norm_and_clip` does. Collective over the group."""
    square = _total_norm(grads, device).square()
    if group.size() > 1:
        torch.distributed.all_reduce(square, group=group)
    norm = square.sqrt() / loss_scale
    _scale_gradients(optimizer, grads, norm, clip, loss_scale)
    return norm


def _total_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of all gradients on this rank, 0-d; 0 if there are none."""
    return torch.linalg.vector_norm(torch.stack(tensor_norms(grads))) if grads else torch.zeros((), device=device)


ROW = 4096
"""Elements per row in `tensor_norms`. In fp32, the error of a row's norm is about one rounding."""


def tensor_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor (0-d).

    On CPU, torch adds a tensor's fp32 squares one after another, so that the norm of 4e7 elements is 0.3 % too
    small. Therefore this function first computes the norms of rows.
    """
    return list(foreach_norm([_row_norms(tensor) if tensor.device.type == "cpu" and tensor.dtype == torch.float32
                              and tensor.numel() > 2 * ROW else tensor for tensor in tensors]))


def _row_norms(tensor: Tensor) -> Tensor:
    """Return a 1-D tensor with the same norm: the norms of all full rows, and the remaining elements."""
    flat = tensor.reshape(-1)
    rows = flat[:flat.numel() // ROW * ROW].view(-1, ROW)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1), flat[rows.numel():]])


def _scale_gradients(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, clip: float,
                     loss_scale: float) -> None:
    """Divide gradients by the loss scale and by the factor that clips them to `clip`.

    torch's fused optimizers divide during the step, which saves a pass over all gradients.
    """
    divisor = None
    if clip > 0:
        # The same small term as in torch.nn.utils.clip_grad_norm_ and DeepSpeed.
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) * loss_scale
    elif loss_scale != 1.0:
        divisor = torch.full_like(norm, loss_scale)
    if supports_grad_scale(optimizer):
        optimizer.grad_scale = divisor
    elif divisor is not None:
        foreach_div_(grads, divisor)
