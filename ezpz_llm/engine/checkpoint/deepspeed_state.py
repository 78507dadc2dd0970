"""The training state inside a DeepSpeed engine: where ZeRO 0 to 3 keep this rank's part of each parameter.

Written against DeepSpeed 0.19. Nothing is gathered to save; after loading, the model's parameters are gathered
once, as they are after a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm.engine.checkpoint import moments
from ezpz_llm.engine.checkpoint.index import whole
from ezpz_llm.engine.checkpoint.slices import EngineState, Slice
from ezpz_llm.engine.checkpoint.torch_state import TorchState
from ezpz_llm.errors import UserError

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
        self.names = {parameter: name for name, parameter in engine.module.named_parameters()}
        # Stage 3 empties a parameter's own shape; the real one is then in ds_shape.
        self.shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape))
                       for parameter, name in self.names.items()}

    @property
    def optimizer_step(self) -> int:
        return moments.get_step(self.zero.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        moments.set_step(self.zero.optimizer, optimizer_step)
        self._refresh_model()

    def _refresh_model(self) -> None:
        raise NotImplementedError

    def _slice(self, parameter: torch.nn.Parameter, start: int, flat: dict[str, torch.Tensor], offset: int,
               numel: int) -> Slice:
        name = self.names[parameter]
        shape = self.shapes[name]
        return Slice(name, shape, whole(shape), start, start + numel,
                     {kind: tensor[offset:offset + numel] for kind, tensor in flat.items()})


class PartitionedOptimizer(_ZeroState):
    """Stages 1 and 2: each parameter group is one flat buffer, cut evenly over the ranks, across parameters."""

    def slices(self) -> list[Slice]:
        inner = self.zero.optimizer
        result = []
        for group, parameters, flat in zip(inner.param_groups, self.zero.bit16_groups,
                                           self.zero.single_partition_of_fp32_groups, strict=True):
            tensors = moments.storage(inner, group, flat)
            for parameter in parameters:
                mapping = parameter._hp_mapping  # None where no element of the parameter lies in this partition
                if mapping is not None:
                    result.append(self._slice(parameter, mapping.lp_fragment_address.start, tensors,
                                              mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel))
        return result

    def _refresh_model(self) -> None:
        self.zero.update_lp_params()


class PartitionedParameters(_ZeroState):
    """Stage 3: each parameter is cut evenly over the ranks (the last part padded), then laid out in sub-groups."""

    def __init__(self, engine: Any, scale: LossScale | None) -> None:
        super().__init__(engine, scale)
        if self.zero.swap_optimizer:
            raise UserError("checkpoints cannot be made of optimizer state that is offloaded to NVMe",
                            where="zero_optimization.offload_optimizer.device",
                            instead='"device": "cpu"')

    def slices(self) -> list[Slice]:
        inner = self.zero.optimizer
        result = []
        for number, (parameters, flat) in enumerate(zip(self.zero.fp16_groups,
                                                        self.zero.fp32_partitioned_groups_flat, strict=True)):
            group = inner.param_groups[self.zero.sub_group_to_group_id[number]]
            tensors = moments.storage(inner, group, flat)
            offset = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                start = size * self.zero._get_param_partition_rank(parameter)
                numel = min(size, parameter.ds_numel - start)
                if numel > 0:
                    result.append(self._slice(parameter, start, tensors, offset, numel))
                offset += size
        return result

    def _refresh_model(self) -> None:
        # As at the end of stage 3's own step: give back what is gathered, write the partitions, gather again the
        # small parameters that stay whole between steps.
        self.zero.checkpoint_event_prologue()
        for number in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.zero.checkpoint_event_epilogue()
