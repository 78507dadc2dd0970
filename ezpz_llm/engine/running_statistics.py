"""Running statistics of norms (BatchNorm, InstanceNorm): fp32 in every precision, and the same on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.layout.precision_recipes import RECIPES

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
          nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def compute_in_fp32(model: nn.Module, precision: str) -> None:
    """Give norms their parameters in fp32 while they compute, where `precision` has parameters of two bytes.

    A tenth of what is new is added to a running mean at each step: in bf16, with 8 bits, most of it would be lost.
    torch has no norm whose statistics are fp32 and whose parameters are not. Inputs and outputs keep two bytes.
    """
    if not RECIPES[precision].has_masters:
        return
    for norm in _with_statistics(model):
        if norm.affine:
            norm.forward = _with_fp32_parameters(norm)


def average(model: nn.Module, mesh: Mesh) -> None:
    """Make running statistics the mean over data-parallel ranks, of which each has those of its own batches.

    The update of a statistic is linear in it, so that this is one process that takes the mean of all ranks' batch
    statistics. Collective.
    """
    if mesh.size("dp", "sp") == 1:
        return
    held = [statistic for norm in _with_statistics(model) if norm.training
            for statistic in (norm.running_mean, norm.running_var)]
    if not held:
        return
    flat = torch.cat([statistic.flatten() for statistic in held])
    torch.distributed.all_reduce(flat, group=mesh.group("dp", "sp"))
    flat /= mesh.size("dp", "sp")
    for statistic, mean in zip(held, flat.split([statistic.numel() for statistic in held]), strict=True):
        statistic.copy_(mean.view_as(statistic))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances, by name."""
    return {f"{name}.{kind}".removeprefix("."): getattr(norm, kind) for name, norm in model.named_modules()
            if _has_statistics(norm) for kind in ("running_mean", "running_var")}


def _with_statistics(model: nn.Module) -> Iterator[Any]:
    return filter(_has_statistics, model.modules())


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) and module.running_mean is not None


def _with_fp32_parameters(norm: Any) -> Any:
    inner = norm.forward

    @functools.wraps(inner)
    def forward(*inputs: Tensor) -> Tensor:
        """The norm's own, with its parameters in fp32."""
        # The engine may have gathered them for this call alone: they are taken here, not before.
        held = dict(norm._parameters)
        norm._parameters.update({name: parameter.float() for name, parameter in held.items()})
        try:
            return inner(*inputs)
        finally:
            norm._parameters.update(held)

    return forward
