"""Training state of DeepSpeed's engines: slices of its parameters, flat fp32 partitions, and optimizer state."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.training.dist.deepspeed_internals import (
    averaged_gradients,
    fragment_of,
    in_memory,
    is_in_files,
    partitioned_groups,
    refresh_parameters,
    refresh_shards,
    shard_numel,
    shard_of,
    sub_groups,
    whole_numel,
    whole_shape,
)
from ezpz_llm.training.engine.optimizer_state import (
    Access,
    EngineState,
    Frozen,
    Slice,
    TorchState,
    adopt,
    groups_of,
    raw,
    slice_placement,
)
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.engine.sliced_optimizer import Member, SlicedOptimizer
from ezpz_llm.training.model.parameters import Placement, placement_of


def deepspeed_state(engine: Any, rank: int, world_size: int, scale: LossScale | None) -> EngineState:
    """Return the training state of a `deepspeed.DeepSpeedEngine`.

    Saving does not gather parameters. After loading, the model's parameters are gathered once, as after a step.

    Args:
        rank, world_size: this rank's index among the data-parallel ranks, and their number.
        scale: the loss scale of fp16, if any.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return TorchState(engine.module, engine.optimizer, rank, world_size, scale)
    if stage == 3:
        return _PartitionedParameters(engine, rank, scale)
    return _PartitionedOptimizer(engine, rank, world_size, scale)


class ZeroState(EngineState):
    """Common part of stages 1 to 3: flat fp32 buffers, stepped by the optimizer inside the ZeRO optimizer."""

    def __init__(self, engine: Any, scale: LossScale | None) -> None:
        self.zero = engine.optimizer
        self.placed = {parameter: placement_of(name, parameter)
                       for name, parameter in engine.module.named_parameters()}
        self.shapes = {at.name: at.shape for at in self.placed.values()}
        optimizer = self.zero.optimizer
        self._sliced = optimizer if isinstance(optimizer, SlicedOptimizer) else None
        trained = set(chain.from_iterable(self._trained))
        super().__init__(optimizer if self._sliced is None else self._sliced.inner, scale, [
            self._place_frozen(parameter, at) for parameter, at in self.placed.items() if parameter not in trained])

    @property
    @abstractmethod
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        """Parameters in each flat buffer."""

    @abstractmethod
    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        """Return this rank's part of a frozen parameter."""

    @abstractmethod
    def partitions(self) -> Iterator[tuple[int, Tensor, list[Member]]]:
        """Yield the number of the parameter group, this rank's flat fp32 weights, and their members."""

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield this rank's elements of each averaged gradient, after the last backward pass of a step."""
        for number, (_, flat, members) in enumerate(self.partitions()):
            # With optimizer offload, gradients are already next to the weights.
            whole, parts = (flat.grad, iter(())) if flat.grad is not None else averaged_gradients(self.zero, number)
            for member in members:
                if whole is not None:
                    yield member.parameter, whole.view(-1)[member.offset:member.offset + member.numel]
                elif self._has_part(member):
                    yield member.parameter, next(parts).view(-1)[:member.numel]
                else:
                    yield member.parameter, flat.new_empty(0)

    def _has_part(self, member: Member) -> bool:
        """Return True if DeepSpeed's list of averaged gradients has an entry for the member."""
        return True

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        for number, (group_number, flat, members) in enumerate(self.partitions()):
            group = groups_of(self.optimizer)[group_number]
            if self._sliced is not None:
                for member, piece in self._sliced.slices[flat]:
                    with tensors_of(self.optimizer, group, piece) as tensors:
                        yield from self._slice(member, {kind: tensor.view(-1) for kind, tensor in tensors.items()})
                continue
            with self._loaded_tensors(number, group, flat, tensors_of) as tensors:
                for member in members:
                    if member.numel:
                        elements = slice(member.offset, member.offset + member.numel)
                        yield from self._slice(member, {kind: tensor[elements] for kind, tensor in tensors.items()})

    def _loaded_tensors(self, number: int, group: dict[str, Any], flat: Tensor,
                        tensors_of: Access) -> AbstractContextManager[dict[str, Tensor]]:
        return tensors_of(self.optimizer, group, flat)

    def _slice(self, member: Member, tensors: dict[str, Tensor]) -> Iterator[Slice]:
        return slice_placement(self.placed[member.parameter], member.start, member.start + member.numel, tensors)

    def stepped(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield each partition, or each slice of it that the optimizer steps."""
        for _, flat, members in self.partitions():
            if self._sliced is None:
                yield flat, [self.placed[member.parameter].name for member in members]
            else:
                yield from ((piece, [self.placed[member.parameter].name])
                            for member, piece in self._sliced.slices[flat])


class _PartitionedOptimizer(ZeroState):
    """State of stages 1 and 2: one flat buffer per parameter group, partitioned evenly over the ranks."""

    def __init__(self, engine: Any, rank: int, world_size: int, scale: LossScale | None) -> None:
        self._replica = rank, world_size
        super().__init__(engine, scale)

    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        return Frozen(at, parameter, 0, *self._replica)

    @property
    def _groups(self) -> tuple[list[list[torch.nn.Parameter]], list[torch.Tensor]]:
        """Parameters of each group, and this rank's partition of their fp32 weights."""
        return partitioned_groups(self.zero)

    @property
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        return self._groups[0]

    def partitions(self) -> Iterator[tuple[int, Tensor, list[Member]]]:
        """Yield the number of each parameter group, this rank's partition, and its members."""
        for number, (parameters, flat) in enumerate(zip(*self._groups, strict=True)):
            yield number, flat, [self._member(parameter) for parameter in parameters]

    def _has_part(self, member: Member) -> bool:
        return bool(member.numel)

    @staticmethod
    def _member(parameter: torch.nn.Parameter) -> Member:
        return Member(parameter, *fragment_of(parameter), tuple(parameter.shape))

    def refresh(self) -> None:
        """Copy the fp32 weights to the model's parameters."""
        refresh_parameters(self.zero)

    def adopt_parameters(self) -> None:
        """Copy changed parameters to this rank's partitions."""
        for _, flat, members in self.partitions():
            for member in members:
                if member.numel:
                    part = member.parameter.detach().view(-1)[member.start:member.start + member.numel]
                    adopt(part, flat.detach()[member.offset:member.offset + member.numel])


class _PartitionedParameters(ZeroState):
    """State of stage 3: each parameter is partitioned evenly over the ranks (with padding), in sub-groups.

    A sub-group whose state is in files is loaded to memory while it is in use.
    """

    def __init__(self, engine: Any, rank: int, scale: LossScale | None) -> None:
        self._rank = rank
        super().__init__(engine, scale)

    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        start, numel = self._part_of(parameter)
        return Frozen(at, shard_of(parameter)[:numel], start, 0, 1)

    @property
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        return [group.parameters for group in sub_groups(self.zero)]

    def _part_of(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return the start and the number of this rank's elements of a parameter, without padding."""
        size, total = shard_numel(parameter), whole_numel(parameter)
        start = min(size * self._rank, total)
        return start, min(size, total - start)

    def partitions(self) -> Iterator[tuple[int, Tensor, list[Member]]]:
        """Yield the number of the parameter group of each sub-group, this rank's partition, and its members."""
        for group in sub_groups(self.zero):
            members, offset = [], 0
            for parameter in group.parameters:
                start, numel = self._part_of(parameter)
                members.append(Member(parameter, start, offset, numel, whole_shape(parameter)))
                offset += shard_numel(parameter)
            yield group.group, group.flat, members

    @contextmanager
    def _loaded_tensors(self, number: int, group: dict[str, Any], flat: Tensor,
                        tensors_of: Access) -> Iterator[dict[str, Tensor]]:
        if tensors_of is raw and is_in_files(self.zero, number):
            yield {}
            return
        with in_memory(self.zero, number), tensors_of(self.optimizer, group, flat) as tensors:
            yield tensors

    def adopt_parameters(self) -> None:
        """Copy changed parameters, among those that are gathered at the moment, to this rank's partitions."""
        for _, flat, members in self.partitions():
            for member in members:
                if member.numel and member.parameter.numel() == math.prod(member.shape):
                    part = member.parameter.detach().view(-1)[member.start:member.start + member.numel]
                    adopt(part, flat.detach()[member.offset:member.offset + member.numel])

    def refresh(self) -> None:
        """Copy the fp32 weights to the partitions, and discard copies of the old weights."""
        refresh_shards(self.zero, self.placed)
