"""Comparison of parameters that tensor-parallel ranks hold as copies."""

from __future__ import annotations

import math

import torch
import torch.distributed as torch_dist
from torch import nn

from ezpz_llm.base import UserError, shorten_value
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model.parameters import placement_of, whole_box


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Compare the sums of each replicated parameter over tensor-parallel ranks. Collective.

    They differ after the first step if activations between the layers differ, for example by dropout that the plan
    does not know, or if the gradient of a parameter between sharded layers is not summed.

    Raises:
        UserError: a parameter differs.
    """
    if mesh.tp_size == 1:
        return
    placed = {name: placement_of(name, parameter) for name, parameter in model.named_parameters()}
    # Under ZeRO-3, only parameters that the last pass left gathered are compared.
    replicated = {name: parameter for name, parameter in model.named_parameters()
                  if placed[name].boxes == (whole_box(placed[name].shape),)
                  and parameter.numel() == math.prod(placed[name].shape)}
    if not replicated:
        return
    sums = torch.stack([parameter.double().abs().sum() for parameter in replicated.values()])
    least, most = sums.clone(), sums.clone()
    torch_dist.all_reduce(least, torch_dist.ReduceOp.MIN, group=mesh.group("tp"))
    torch_dist.all_reduce(most, torch_dist.ReduceOp.MAX, group=mesh.group("tp"))
    differing = [name for name, differs in zip(replicated, (least != most).tolist(), strict=True) if differs]
    if differing:
        raise UserError("tensor-parallel ranks have different copies after the first step of "
                        f"{shorten_value(', '.join(differing))}", where="ezpz_llm.wrap, tp_plan",
                        instead="the same samples and seeds on ranks with the same run.mesh.dp_rank; no dropout "
                                "between colwise and rowwise layers; for parameters there, the style "
                                "replicated_with_grad_allreduce")
