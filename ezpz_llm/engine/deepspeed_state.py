"""The training state inside a DeepSpeed engine: where ZeRO 0 to 3 keep this rank's part of each parameter.

Written against DeepSpeed 0.19. Nothing is gathered to save; after loading, the model's parameters are gathered
once, as they are after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm.engine import optimizer_state
from ezpz_llm.engine.optimizer_state import EngineState, Slice, TorchState, cut
from ezpz_llm.model.parameters import placement_of

if TYPE_CHECKING:
    from ezpz_llm.engine.precision import LossScale


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
        super().__init__(scale)
        self.zero = engine.optimizer
        self.placed = {parameter: placement_of(name, parameter)
                       for name, parameter in engine.module.named_parameters()}
        self.shapes = {at.name: at.shape for at in self.placed.values()}

    @property
    def optimizer_step(self) -> int:
        return optimizer_state.get_step(self.zero.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        optimizer_state.set_step(self.zero.optimizer, optimizer_step)
        self._refresh_model()

    def _refresh_model(self) -> None:
        raise NotImplementedError

    def _cut(self, parameter: torch.nn.Parameter, start: int, flat: dict[str, torch.Tensor], offset: int,
             numel: int) -> Iterator[Slice]:
        tensors = {kind: tensor[offset:offset + numel] for kind, tensor in flat.items()}
        return cut(self.placed[parameter], start, start + numel, tensors)


class PartitionedOptimizer(_ZeroState):
    """Stages 1 and 2: each parameter group is one flat buffer, cut evenly over the ranks, across parameters."""

    def slices(self) -> Iterator[Slice]:
        return self._slices(optimizer_state.at_hand)

    def extents(self) -> Iterator[Slice]:
        return self._slices(optimizer_state.extent)

    def _slices(self, tensors_of: optimizer_state.Access) -> Iterator[Slice]:
        inner = self.zero.optimizer
        for group, parameters, flat in zip(inner.param_groups, self.zero.bit16_groups,
                                           self.zero.single_partition_of_fp32_groups, strict=True):
            with tensors_of(inner, group, flat) as tensors:
                for parameter in parameters:
                    mapping = parameter._hp_mapping  # None where no element of the parameter lies in this partition
                    if mapping is not None:
                        yield from self._cut(parameter, mapping.lp_fragment_address.start, tensors,
                                             mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)

    def _refresh_model(self) -> None:
        self.zero.update_lp_params()


class PartitionedParameters(_ZeroState):
    """Stage 3: each parameter is cut evenly over the ranks (the last part padded), then laid out in sub-groups.

    A sub-group whose state lies in files is brought into memory for as long as one works on it.
    """

    def slices(self) -> Iterator[Slice]:
        for number in range(len(self.zero.fp16_groups)):
            with self._at_hand(number), self._tensors(number, optimizer_state.at_hand) as tensors:
                yield from self._sub_group(number, tensors)

    def extents(self) -> Iterator[Slice]:
        for number in range(len(self.zero.fp16_groups)):
            with (nullcontext({}) if self._in_files(number)
                  else self._tensors(number, optimizer_state.extent)) as tensors:
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

    def _tensors(self, number: int,
                 tensors_of: optimizer_state.Access) -> AbstractContextManager[dict[str, torch.Tensor]]:
        inner = self.zero.optimizer
        group = inner.param_groups[self.zero.sub_group_to_group_id[number]]
        return tensors_of(inner, group, self.zero.fp32_partitioned_groups_flat[number])

    def _in_files(self, number: int) -> bool:
        return self.zero._swappable_optimizer_subgroup(number)

    @contextmanager
    def _at_hand(self, number: int) -> Iterator[None]:
        if not self._in_files(number):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            self.zero._optimizer_states_and_gradient_swap_out(number)

    def _refresh_model(self) -> None:
        # As at the end of stage 3's own step: give back what is gathered, write the partitions, gather again the
        # small parameters that stay whole between steps.
        self.zero.checkpoint_event_prologue()
        for number in range(len(self.zero.fp16_groups)):
            with self._at_hand(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.zero.checkpoint_event_epilogue()
