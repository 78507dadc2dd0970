"""Differentiable sums over tensor-parallel ranks.

The input of a sharded region is the same on every rank, and so is its output, a sum of the ranks' parts (Shoeybi et
al. 2019, arXiv:1909.08053). The end of a region communicates in the forward pass, its start in the backward pass.

Sums are communicated in the dtype of the residual stream. Under autocast this is fp32, so that every part is
rounded once, like the matmul of a single process. In bf16 and fp16, sums are rounded again at each hop of a ring,
as in Megatron and torchtitan.

`group` is the ranks' process group; None is the whole world, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # the gradient of a sum over ranks would need another sum
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group, grad.dtype), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.dtype, kind = x.dtype, x.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on the meta device
        return summed(x, group, torch.float32 if casts else x.dtype)

    @staticmethod
    @once_differentiable  # the gradient of a sum over ranks would need another sum
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def summed(x: Tensor, group: ProcessGroup | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of the ranks' tensors, in `dtype`."""
    # Always copy, because `x` may be a saved activation or a gradient that is still in use.
    total = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def copy_to_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return `x`; its gradient is summed over the ranks."""
    return _SumBackward.apply(x, group)


def reduce_from_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum of the ranks' parts, in fp32 under autocast; each part gets the gradient of the sum."""
    return _SumForward.apply(x, group)


def gather_last_dim(x: Tensor, group: ProcessGroup | None, ranks: int) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, without gradient."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    torch.distributed.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim=-1)
