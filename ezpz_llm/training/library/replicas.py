"""Comparison of what must be equal on all ranks: copies of parameters, and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError, shorten_value
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.model.parameters import placement_of, whole_box

_CHUNK = 2 ** 20
_INTEGERS = {2: torch.int16, 4: torch.int32}


def is_compared(step: int) -> bool:
    """Return True if ranks are compared before a step: the first four, then each power of two."""
    return step <= 4 or step & (step - 1) == 0


def check_data_parallel(model: nn.Module, rates: Iterable[float], mesh: Mesh, *, has_copies: bool) -> None:
    """Compare learning rates, and copies of parameters, over data-parallel ranks. Collective.

    Args:
        rates: learning rates of the optimizer's groups.
        has_copies: True if every rank has whole parameters.

    Raises:
        UserError: a value differs.
    """
    if mesh.size("dp", "sp") == 1:
        return
    device = next(model.parameters()).device
    values = {f"the learning rate of group {number}": torch.tensor(float(rate), dtype=torch.float64, device=device)
              .view(torch.int64) for number, rate in enumerate(rates)}
    if has_copies:
        values |= {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    if differing := _differing(values, mesh.group("dp", "sp")):
        raise UserError(f"ranks have different values of {shorten_value(', '.join(differing))}",
                        where="Wrapped.step",
                        instead="the same writes to parameters and learning rates on all ranks: of averages over "
                                "ranks, with the same seed, or in model.gathered(), which keeps rank 0's values")


def check_tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Compare each replicated parameter over tensor-parallel ranks. Collective.

    They differ after the first step if activations between the layers differ, for example by dropout that the plan
    does not know, or if the gradient of a parameter between sharded layers is not summed.

    Raises:
        UserError: a parameter differs.
    """
    if mesh.tp_size == 1:
        return
    placed = {name: placement_of(name, parameter) for name, parameter in model.named_parameters()}
    # Under ZeRO-3, only parameters that the last pass left gathered are compared.
    replicated = {name: fingerprint(parameter) for name, parameter in model.named_parameters()
                  if placed[name].boxes == (whole_box(placed[name].shape),)
                  and parameter.numel() == math.prod(placed[name].shape)}
    if differing := _differing(replicated, mesh.group("tp")):
        raise UserError("tensor-parallel ranks have different copies after the first step of "
                        f"{shorten_value(', '.join(differing))}", where="ezpz_llm.wrap, tp_plan",
                        instead="the same samples and seeds on ranks with the same run.mesh.dp_rank; no dropout "
                                "between colwise and rowwise layers; for parameters there, the style "
                                "replicated_with_grad_allreduce")


def _differing(values: Mapping[str, Tensor], group: ProcessGroup | None) -> list[str]:
    """Return the names of integers (0-d) that are not equal on all ranks of a group. Collective."""
    if not values:
        return []
    least = torch.stack(list(values.values()))
    most = least.clone()
    torch_dist.all_reduce(least, torch_dist.ReduceOp.MIN, group=group)
    torch_dist.all_reduce(most, torch_dist.ReduceOp.MAX, group=group)
    return [name for name, differs in zip(values, (least != most).tolist(), strict=True) if differs]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 (0-d) that changes if a bit of a floating-point tensor changes, with near certainty.

    Integers have no rounding, so that the number of threads does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    for number, chunk in enumerate(elements.split(_CHUNK) if len(elements) else ()):
        weights = torch.arange(1, 2 * len(chunk), 2, device=chunk.device)
        total += (2 * number + 1) * (chunk * weights).sum()
    return total
