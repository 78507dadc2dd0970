"""Optimizer for DeepSpeed's flat partitions that steps each parameter's slice as a tensor of its own.

With a flat tensor per parameter group, all parameters of a group would share one step count, and a parameter
without a gradient would be stepped with a gradient of zero. With slices, an optimizer does what it does without
DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Member:
    """Elements of a parameter in a flat partition.

    Attributes:
        start: first element in this rank's flattened parameter.
        offset: first element in the partition.
        numel: number of elements.
        shape: shape of this rank's parameter.
    """

    parameter: nn.Parameter
    start: int
    offset: int
    numel: int
    shape: tuple[int, ...]

    def view_in(self, flat: Tensor) -> Tensor:
        """Return a view of the elements in a partition, in the shape of the parameter if it is whole."""
        elements = flat.detach()[self.offset:self.offset + self.numel]
        return elements.view(self.shape) if self.numel == math.prod(self.shape) else elements


class SlicedOptimizer(torch.optim.Optimizer):
    """Optimizer that DeepSpeed calls, and that passes slices of its flat partitions to a script's optimizer.

    Attributes:
        inner: the script's optimizer. After `bind`, its groups have slices.
        slices: members of each partition, with their slices.
    """

    def __init__(self, inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, dict(inner.defaults))
        self.inner = inner
        self.slices: dict[Tensor, list[tuple[Member, Tensor]]] = {}
        self._forgotten: set[nn.Parameter] = set()

    def bind(self, partitions: Iterable[tuple[int, Tensor, Iterable[Member]]]) -> None:
        """Set the partitions once DeepSpeed has created them.

        Args:
            partitions: for each, the number of its parameter group, the flat tensor, and its members.
        """
        for group in self.inner.param_groups:
            group["params"] = []
        for number, flat, members in partitions:
            self.slices[flat] = [(member, member.view_in(flat)) for member in members if member.numel]
            self.inner.param_groups[number]["params"] += [piece for _, piece in self.slices[flat]]

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Do not step these parameters in the next step."""
        self._forgotten |= set(parameters)

    def finish_step(self) -> None:
        """Step all parameters again from the next step on."""
        self._forgotten.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step the slices of the partitions in the current groups that have gradients."""
        stepped = []
        for flat in (flat for group in self.param_groups for flat in group["params"]):
            if flat.grad is None:
                continue
            for member, piece in self.slices[flat]:
                if member.parameter not in self._forgotten:
                    piece.grad = member.view_in(flat.grad)
                    stepped.append(piece)
        if stepped:
            self.inner.step()
        for piece in stepped:
            piece.grad = None
