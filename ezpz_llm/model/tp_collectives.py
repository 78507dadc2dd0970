"""Sums over the ranks that share a layer, and how gradients pass them.

A region of a sharded model is entered with activations that are the same on every rank and left with a sum of the
ranks' parts, which is the same again (Shoeybi et al. 2019, arXiv:1909.08053). Of these two, one communicates in the
forward pass and the other in the backward pass.

Sums travel in the dtype of the residual stream that they are added to, and of its gradient. Under autocast that is
fp32: every part has been rounded once, like the product that a single process makes. In bf16 and fp16 it is two
bytes, rounded again at each hop of a ring, as everyone's tensor parallelism does it (Megatron, torchtitan).

`group` is the ranks' process group; None is the whole world, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group, grad.dtype), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.dtype, kind = x.dtype, x.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on the meta device
        return summed(x, group, torch.float32 if casts else x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def summed(x: Tensor, group: ProcessGroup | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum of the ranks' tensors in a dtype."""
    # A copy also where it is x's: neither a saved activation nor a gradient in flight may change.
    total = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def copy_to_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The same activation; its gradient is the sum of the ranks' gradients."""
    return _SumBackward.apply(x, group)


def reduce_from_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of the ranks' parts, in fp32 under autocast; each part has the sum's gradient."""
    return _SumForward.apply(x, group)


def join_last(x: Tensor, group: ProcessGroup | None, ranks: int) -> Tensor:
    """The ranks' parts side by side along the last dimension. Has no gradient."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    torch.distributed.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim=-1)
