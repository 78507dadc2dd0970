"""Running statistics of norms (BatchNorm, InstanceNorm): fp32 in every precision, and the same on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.dist.torch_internals import parameters_by_name
from ezpz_llm.training.layout.precision_recipes import RECIPES

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
          nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def compute_in_fp32(model: nn.Module, precision: str) -> None:
    """Make norms compute with fp32 parameters if `precision` keeps parameters in 16 bits.

    Each step moves a running mean by a tenth of its distance to the batch mean. bf16, with its 8 mantissa bits,
    would lose most of that update. torch does not support norms with fp32 statistics and 16-bit parameters. Inputs
    and outputs stay at 16 bits.
    """
    if not RECIPES[precision].has_masters:
        return
    for norm in _with_statistics(model):
        if norm.affine:
            norm.forward = _with_fp32_parameters(norm)


def average(model: nn.Module, mesh: Mesh) -> None:
    """Average running statistics over data-parallel ranks, whose batches differ. Collective.

    Since the update of a statistic is linear, the result equals that of a single process that averages all ranks'
    batch statistics.
    """
    if mesh.size("dp", "sp") == 1:
        return
    statistics = [statistic for norm in _with_statistics(model) if norm.training
                  for statistic in (norm.running_mean, norm.running_var)]
    if not statistics:
        return
    flat = torch.cat([statistic.flatten() for statistic in statistics])
    torch.distributed.all_reduce(flat, group=mesh.group("dp", "sp"))
    flat /= mesh.size("dp", "sp")
    sizes = [statistic.numel() for statistic in statistics]
    for statistic, mean in zip(statistics, flat.split(sizes), strict=True):
        statistic.copy_(mean.view_as(statistic))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return running means and variances, by name."""
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
        """Run the norm with its parameters in fp32."""
        # Read the parameters here, since the engine may have gathered them for this call only.
        current: dict[str, Any] = parameters_by_name(norm)
        parameters = dict(current)
        current.update({name: parameter.float() for name, parameter in parameters.items()})
        try:
            return inner(*inputs)
        finally:
            current.update(parameters)

    return forward
