"""Engine for layouts zero0 to zero3: DeepSpeed with a client optimizer.

Written for DeepSpeed 0.19. In fp32 and under autocast, DeepSpeed gets fp32 parameters and no precision block,
so that its reductions, optimizer and norms are in fp32 in every stage, and all ranks use the same loss scale. In
bf16, its config has a bf16 block with the dtypes for gradient accumulation and reduction.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.dist import Dist
from ezpz_llm.engine import nvme
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.engine.deepspeed_groups import ModelParallelUnit, using_mesh_groups
from ezpz_llm.engine.deepspeed_import import import_deepspeed, load_op
from ezpz_llm.engine.gradients import norm_and_clip
from ezpz_llm.engine.optimizer_state import (
    Access,
    EngineState,
    Frozen,
    MakeOptimizer,
    Slice,
    TorchState,
    raw,
    set_lr,
    slice_placement,
)
from ezpz_llm.engine.precision import LossScale, parameter_dtype
from ezpz_llm.engine.sharded_start import partition
from ezpz_llm.layout.ds_defaults import uses_nvme
from ezpz_llm.layout.ops import needed_ops
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.parameters import Placement, placement_of, size


class DeepSpeedEngine(MicroStepEngine):
    """Engine that wraps `deepspeed.DeepSpeedEngine`."""

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        super().__init__(model, resolved, dist)
        dist.ensure_group()
        deepspeed = import_deepspeed(dist.device.type)
        for name in needed_ops(self.layout):
            load_op(name)
        optimizer = make(groups)
        mpu = ModelParallelUnit(dist.mesh) if self.layout.tp > 1 else None
        config = resolved.for_deepspeed(dist.run_dir)
        if uses_nvme(self.layout):
            nvme.prepare(config["zero_optimization"], resolved.nvme_path, model, dist, owner=self)
        with using_mesh_groups(deepspeed, dist.mesh):
            if self.layout.zero.stage == 3:
                partition(model, deepspeed, config, mpu, dist.mesh, parameter_dtype(resolved.precision))
            mark_sharded(model)
            self._engine = deepspeed.initialize(args=SimpleNamespace(device_rank=dist.device.index or 0),
                                                model=model, optimizer=optimizer, mpu=mpu, config=config)[0]
        zero = self._engine.optimizer
        if self.layout.zero.stage:
            _report_invalid_norms(zero)
        if uses_nvme(self.layout):
            nvme.keep_unaligned_gradients(zero)
        if self.layout.zero.stage in (1, 2):
            keep_until_reduced(zero)
            # DeepSpeed's search of every gradient for NaN and Inf is not needed either: it took about 30 % of a
            # step of GPT-2 124M on an H200.
            zero.check_grad_overflow = False
        self.step_skip.guard(optimizer, (lambda: zero._global_grad_norm) if self.layout.zero.stage else None)

    def forward(self, *inputs: Any, last_micro_step: bool, **named: Any) -> Any:
        """Return the loss of a micro-batch; DeepSpeed reduces gradients in the backward pass of the last one."""
        self._engine.set_gradient_accumulation_boundary(last_micro_step)
        return self._engine(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the micro-batch's gradients, multiplied by the loss scale."""
        # DeepSpeed divides by the accumulation steps itself. Its ZeRO optimizers apply the loss scale, but stage 0
        # does not.
        if self.layout.zero.stage == 0:
            loss = loss * self._loss_factor
        elif self._scale is not None:
            self._engine.optimizer.override_loss_scale(self._scale.scale)
        self._engine.backward(loss)

    def step(self, lr: float | None) -> Tensor:
        """Clip gradients and perform an optimizer step; return the global gradient norm (0-d) before clipping."""
        set_lr(self._engine.optimizer, lr)
        norm = self._step_stage_0() if self.layout.zero.stage == 0 else self._step_partitioned()
        self._update_scale(norm)
        return norm

    def _step_stage_0(self) -> Tensor:
        """Step in stage 0, for which DeepSpeed computes no norm in fp32: compute the norm here, and clip."""
        norm = norm_and_clip(self.module, self._mesh, self._engine.optimizer, self._clip, self._loss_factor)
        self.step_skip.norm = norm
        if self._scale is not None and not torch.isfinite(norm):
            self._engine.zero_grad()
            return torch.full_like(norm, float("inf"))
        self._engine.step()
        return norm

    def _step_partitioned(self) -> Tensor:
        """Step in stages 1 to 3, which skip a step with a non-finite norm and report it as infinite."""
        self._engine.step()
        if self.layout.zero.stage == 3 and self.may_have_unused:
            _zero_gradients(self._engine.optimizer)
        return torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def training_state(self) -> EngineState:
        """Return slices of DeepSpeed's parameters and optimizer state."""
        return deepspeed_state(self._engine, *self._replica, self._scale)


def _zero_gradients(zero: Any) -> None:
    """Set stage 3's gradients to zero after a step, except those in files.

    DeepSpeed overwrites a gradient in the first micro-step of the next step, and with optimizer offload copies it
    in the last one. It keeps the old gradient of a parameter that the loss of this micro-step does not depend on.
    """
    zero.grad_partitions_flat_buffer.zero_()
    for flat in zero.fp32_partitioned_groups_flat:
        if flat.grad is not None:
            flat.grad.zero_()


def _report_invalid_norms(zero: Any) -> None:
    """Make the gradient norm Inf if that of a parameter group is NaN or Inf, so that the step is skipped.

    DeepSpeed replaces such a norm with -1, which versions before 0.19.8 combine with the other groups' norms to a
    finite one.
    """
    for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
        setattr(zero, name, _with_invalid_as_inf(getattr(zero, name)))


def _with_invalid_as_inf(get_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_checked_norm(*args: Any, **named: Any) -> Tensor:
        norm = get_norm(*args, **named)
        return torch.where(norm < 0, math.inf, norm)

    return get_checked_norm


def keep_until_reduced(zero: Any) -> None:
    """Keep the allocator from reusing a gradient's memory while stage 1 or 2 reduces it on a separate stream.

    DeepSpeed reduces a gradient that is larger than the bucket in place. If other ranks own the gradient, stage 2
    frees it as soon as the reduction is issued, and the allocator knows only the stream that allocated it
    (deepspeed 0.19.8, stage_1_and_2.py, which calls record_stream only for parts that this rank keeps).
    """
    if not zero.overlap_comm or zero.reduction_stream is None:
        return
    average = zero.average_tensor

    def average_tensor(tensor: Tensor, *args: Any) -> None:
        """Average a buffer, and keep it until the reduction stream has read it."""
        tensor.record_stream(zero.reduction_stream)
        average(tensor, *args)

    zero.average_tensor = average_tensor


def mark_sharded(model: nn.Module) -> None:
    """Mark parameters that are sharded over model-parallel ranks.

    DeepSpeed's norms include a marked parameter on every tensor-parallel rank, and any other parameter only on
    the first. Without the mark, part of a sharded parameter would be missing in the norm, and gradients would be
    clipped too little.
    """
    for name, parameter in model.named_parameters():
        at = placement_of(name, parameter)
        parameter.tensor_model_parallel = sum(map(size, at.boxes)) < math.prod(at.shape)


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


class _ZeroState(EngineState):
    """Common part of stages 1 to 3: flat fp32 buffers, stepped by the optimizer inside the ZeRO optimizer."""

    def __init__(self, engine: Any, scale: LossScale | None) -> None:
        self.zero = engine.optimizer
        self.placed = {parameter: placement_of(name, parameter)
                       for name, parameter in engine.module.named_parameters()}
        self.shapes = {at.name: at.shape for at in self.placed.values()}
        trained = set(chain.from_iterable(self._trained))
        super().__init__(self.zero.optimizer, scale, [
            self._place_frozen(parameter, at) for parameter, at in self.placed.items() if parameter not in trained])

    @property
    @abstractmethod
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        """Parameters in each flat buffer."""

    @abstractmethod
    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        """Return this rank's part of a frozen parameter."""

    def _slice_flat(self, parameter: torch.nn.Parameter, start: int, flat: dict[str, torch.Tensor], offset: int,
                    numel: int) -> Iterator[Slice]:
        tensors = {kind: tensor[offset:offset + numel] for kind, tensor in flat.items()}
        return slice_placement(self.placed[parameter], start, start + numel, tensors)


class _PartitionedOptimizer(_ZeroState):
    """State of stages 1 and 2: one flat buffer per parameter group, partitioned evenly over the ranks."""

    def __init__(self, engine: Any, rank: int, world_size: int, scale: LossScale | None) -> None:
        self._replica = rank, world_size
        super().__init__(engine, scale)

    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        return Frozen(at, parameter, 0, *self._replica)

    @property
    def _groups(self) -> tuple[list[list[torch.nn.Parameter]], list[torch.Tensor]]:
        """Parameters of each group, and this rank's partition of their fp32 weights."""
        if hasattr(self.zero, "bf16_groups"):  # the optimizer of pipelines in bf16
            return self.zero.bf16_groups, self.zero.fp32_groups_flat_partition
        return self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups

    @property
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        return self._groups[0]

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        for group, parameters, flat in zip(self.optimizer.param_groups, *self._groups, strict=True):
            with tensors_of(self.optimizer, group, flat) as tensors:
                for parameter in parameters:
                    mapping = parameter._hp_mapping  # None if no element of the parameter is in this partition
                    if mapping is not None:
                        yield from self._slice_flat(parameter, mapping.lp_fragment_address.start, tensors,
                                                    mapping.hp_fragment_address.start,
                                                    mapping.hp_fragment_address.numel)

    def stepped(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield each group's partition."""
        for parameters, flat in zip(*self._groups, strict=True):
            yield flat, [self.placed[parameter].name for parameter in parameters]

    def loaded(self, optimizer_step: int) -> None:
        """Copy the loaded fp32 weights to the model's parameters."""
        super().loaded(optimizer_step)
        self.zero.update_lp_params()


class _PartitionedParameters(_ZeroState):
    """State of stage 3: each parameter is partitioned evenly over the ranks (with padding), in sub-groups.

    A sub-group whose state is in files is loaded to memory while it is in use.
    """

    def __init__(self, engine: Any, rank: int, scale: LossScale | None) -> None:
        self._rank = rank
        super().__init__(engine, scale)

    def _place_frozen(self, parameter: torch.nn.Parameter, at: Placement) -> Frozen:
        start, numel = self._part_of(parameter)
        return Frozen(at, parameter.ds_tensor[:numel], start, 0, 1)

    @property
    def _trained(self) -> list[list[torch.nn.Parameter]]:
        return self.zero.fp16_groups

    def _part_of(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return the start and the number of this rank's elements of a parameter, without padding."""
        size = parameter.partition_numel()
        start = min(size * self._rank, parameter.ds_numel)
        return start, min(size, parameter.ds_numel - start)

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
            start, numel = self._part_of(parameter)
            if numel:
                yield from self._slice_flat(parameter, start, tensors, offset, numel)
            offset += parameter.partition_numel()

    def stepped(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield each sub-group's partition."""
        for parameters, flat in zip(self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat, strict=True):
            yield flat, [self.placed[parameter].name for parameter in parameters]

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
        """Copy the loaded fp32 weights to the partitions, and discard copies of the old weights."""
        super().loaded(optimizer_step)
        # As at the end of stage 3's step: release gathered parameters, write the partitions, and gather the small
        # parameters that are kept between steps.
        self.zero.checkpoint_event_prologue()
        for parameter in self.placed:
            # hpZ's copy of the old weights; DeepSpeed's invalidate_secondary_tensor omits frozen parameters.
            parameter.ds_secondary_tensor = None
        for number in range(len(self.zero.fp16_groups)):
            with self._in_memory(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.zero.checkpoint_event_epilogue()
