"""The training state inside a DeepSpeed engine: where ZeRO 0 to 3 keep this rank's part of each parameter.

Written against DeepSpeed 0.19. Nothing is gathered to save; after loading, the model's parameters are gathered
once, as they are after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ezpz_llm.engine.optimizer_state import Access, EngineState, Slice, TorchState, cut, raw
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.model.parameters import placement_of


def deepspeed_state(engine: Any, rank: int, world_size: int, scale: LossScale | None) -> EngineState:
    """The state of a `deepspeed.DeepSpeedEngine`.

    Args:
        rank, world_size: among the data-parallel ranks.
        scale: the loss scale of fp16, if there is one.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return TorchState(engine.module, engine.optimizer, rank, world_size, scale)
    return PartitionedParameters(engine, scale) if stage == 3 else PartitionedOptimizer(engine, scale)


class _ZeroState(EngineState):
    """What stages 1 to 3 have in common: fp32 in flat buffers, stepped by an optimizer inside the optimizer."""

    def __init__(self, engine: Any, scale: LossScale | None) -> None:
        super().__init__(engine.optimizer.optimizer, scale)
        self.zero = engine.optimizer
        self.placed = {parameter: placement_of(name, parameter)
                       for name, parameter in engine.module.named_parameters()}
        self.shapes = {at.name: at.shape for at in self.placed.values()}

    def _cut(self, parameter: torch.nn.Parameter, start: int, flat: dict[str, torch.Tensor], offset: int,
             numel: int) -> Iterator[Slice]:
        tensors = {kind: tensor[offset:offset + numel] for kind, tensor in flat.items()}
        return cut(self.placed[parameter], start, start + numel, tensors)


class PartitionedOptimizer(_ZeroState):
    """Stages 1 and 2: each parameter group is one flat buffer, cut evenly over the ranks, across parameters."""

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        for group, parameters, flat in zip(self.optimizer.param_groups, self.zero.bit16_groups,
                                           self.zero.single_partition_of_fp32_groups, strict=True):
            with tensors_of(self.optimizer, group, flat) as tensors:
                for parameter in parameters:
                    mapping = parameter._hp_mapping  # None where no element of the parameter lies in this partition
                    if mapping is not None:
                        yield from self._cut(parameter, mapping.lp_fragment_address.start, tensors,
                                             mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)

    def loaded(self, optimizer_step: int) -> None:
        super().loaded(optimizer_step)
        self.zero.update_lp_params()


class PartitionedParameters(_ZeroState):
    """Stage 3: each parameter is cut evenly over the ranks (the last part padded), then laid out in sub-groups.

    A sub-group whose state lies in files is brought into memory for as long as one works on it.
    """

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        for number in range(len(self.zero.fp16_groups)):
            if tensors_of is raw and self.zero._swappable_optimizer_subgroup(number):
                yield from self._sub_group(number, {})
                continue
            group = self.optimizer.param_groups[self.zero.sub_group_to_group_id[number]]
            flat = self.zero.fp32_partitioned_groups_flat[number]
            with self._in_memory(number), tensors_of(self.optimizer, group, flat) as tensors:
                yield from self._sub_group(number, tensors)

    def _sub_group(self, number: int, tensors: dict[str, torch.Tensor]) -> Iterator[Slice]:
        offset = 0
        for parameter in self.zero.fp16_groups[number]:
            size = parameter.partition_numel()
            start = size * self.zero._get_param_partition_rank(parameter)
            numel = min(size, parameter.ds_numel - start)
            if numel > 0:
                yield from self._cut(parameter, start, tensors, offset, numel)
            offset += size

    @contextmanager
    def _in_memory(self, number: int) -> Iterator[None]:
        if not self.zero._swappable_optimizer_subgroup(number):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            self.zero._optimizer_states_and_gradient_swap_out(number)

    def loaded(self, optimizer_step: int) -> None:
        super().loaded(optimizer_step)
        # As at the end of stage 3's own step: give back what is gathered, write the partitions, gather again the
        # small parameters that stay whole between steps.
        self.zero.checkpoint_event_prologue()
        for number in range(len(self.zero.fp16_groups)):
            with self._in_memory(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.zero.checkpoint_event_epilogue()
