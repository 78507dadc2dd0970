"""Engine for layouts zero0 to zero3: DeepSpeed with a client optimizer.

Written for DeepSpeed 0.19. In fp32 and under autocast, DeepSpeed gets fp32 parameters and no precision block,
so that its reductions, optimizer and norms are in fp32 in every stage, and all ranks use the same loss scale. In
bf16, its config has a bf16 block with the dtypes for gradient accumulation and reduction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.training.dist import Dist, deepspeed_patches
from ezpz_llm.training.dist.deepspeed_internals import (
    discard_averaged_gradients,
    gradient_norm,
    mark_tensor_parallel,
    release_gathered,
    set_loss_scale,
    zero_partitioned_gradients,
)
from ezpz_llm.training.engine import nvme
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.deepspeed_groups import ModelParallelUnit, using_mesh_groups
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed, load_op
from ezpz_llm.training.engine.deepspeed_state import ZeroState, deepspeed_state
from ezpz_llm.training.engine.gradients import norm_and_clip
from ezpz_llm.training.engine.optimizer_state import EngineState, MakeOptimizer, set_lr
from ezpz_llm.training.engine.precision import parameter_dtype
from ezpz_llm.training.engine.sharded_start import partition
from ezpz_llm.training.engine.sliced_optimizer import SlicedOptimizer
from ezpz_llm.training.layout.ds_defaults import uses_nvme
from ezpz_llm.training.layout.ops import needed_ops
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.model.parameters import placement_of, size


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
            deepspeed_patches.report_invalid_norms(zero)
        nvme.keep_unaligned_gradients(zero, self.layout)
        if self.layout.zero.stage in (1, 2):
            deepspeed_patches.keep_until_reduced(zero)
            deepspeed_patches.skip_overflow_check(zero)
        if self.layout.zero.stage == 3:
            model.register_forward_hook(self._release_after_evaluation)
        self._sliced: SlicedOptimizer | None = None
        if isinstance(optimizer, SlicedOptimizer):
            self._sliced = optimizer
            state = deepspeed_state(self._engine, *self._replica, self.loss_scale)
            assert isinstance(state, ZeroState)
            optimizer.bind(state.partitions())
            optimizer = optimizer.inner
        self.step_skip.guard(optimizer, (lambda: gradient_norm(zero)) if self.layout.zero.stage else None)

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer, which wraps the optimizer that steps."""
        return self._engine.optimizer

    def _release_after_evaluation(self, *_: Any) -> None:
        """Release the parameters of a script that stage 3 keeps for a backward pass, if none follows.

        Otherwise, what the script writes to them next would be lost, and parameters gathered in inference mode
        would be used for training.
        """
        if self.may_have_unused and not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.no_grad():
                release_gathered(self._engine.optimizer)

    def backward(self, loss: Tensor, is_last: bool, retain_graph: bool = False) -> None:
        """Accumulate the micro-batch's gradients, multiplied by the loss scale."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed divides by the accumulation steps itself. Its ZeRO optimizers apply the loss scale, but stage 0
        # does not.
        if self.layout.zero.stage == 0:
            loss = loss * self._loss_factor
        elif self.loss_scale is not None:
            set_loss_scale(self._engine.optimizer, self.loss_scale.scale)
        self._engine.backward(self._passed_through(loss), retain_graph=retain_graph)

    def _passed_through(self, loss: Tensor) -> Tensor:
        """Return the loss as the output of DeepSpeed's engine.

        DeepSpeed prepares a backward pass in hooks of the output of exactly one forward pass. The model may have
        been called several times, directly, or not at all since then, so the engine's forward pass is an identity.
        """
        with deepspeed_patches.using_module(self._engine, nn.Identity()):
            output: Tensor = self._engine(loss)
        return output

    def show_gradients(self) -> None:
        """Do nothing: DeepSpeed has averaged the gradients in the last backward pass."""

    @property
    def hides_gradients(self) -> bool:
        """True for stages with partitioned gradients."""
        return bool(self.layout.zero.stage)

    @property
    def gradient_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The data-parallel ranks, if there are several, for stages with partitioned gradients."""
        is_partitioned = self.layout.zero.stage and self._mesh.size("dp", "sp") > 1
        return (self._mesh.group("dp", "sp"),) if is_partitioned else ()

    def local_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield this rank's elements of the gradients, without a dimension if partitioned."""
        if self.layout.zero.stage == 0:
            return ((parameter, parameter.grad) for parameter in self.module.parameters()
                    if parameter.grad is not None)
        state = self.training_state()
        assert isinstance(state, ZeroState)
        return state.gradients()

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Make the step ignore parameters."""
        if self._sliced is not None:
            self._sliced.forget(parameters)
        for parameter in parameters:
            parameter.grad = None

    def discard_gradients(self) -> None:
        """Discard the gradients since the last step."""
        zero, stage = self._engine.optimizer, self.layout.zero.stage
        if stage == 0:
            self._engine.zero_grad()
            return
        zero.zero_grad()
        if stage in (1, 2):
            discard_averaged_gradients(zero)
        else:
            zero_partitioned_gradients(zero)

    def release(self) -> None:
        """Remove DeepSpeed's hooks, which make cycles that Python does not see."""
        self._engine.destroy()

    def step(self, lr: float | None) -> Tensor:
        """Clip gradients and perform an optimizer step; return the global gradient norm (0-d) before clipping."""
        set_lr(self._engine.optimizer, lr)
        norm = self._step_stage_0() if self.layout.zero.stage == 0 else self._step_partitioned()
        self._update_scale(norm)
        return norm

    def _step_stage_0(self) -> Tensor:
        """Step in stage 0, for which DeepSpeed computes no norm in fp32: compute the norm here, and clip."""
        norm = norm_and_clip(self.module, self._mesh, self._engine.optimizer, self.clip, self._loss_factor)
        self.step_skip.norm = norm
        if self.loss_scale is not None and not torch.isfinite(norm):
            self._engine.zero_grad()
            return torch.full_like(norm, float("inf"))
        self._engine.step()
        return norm

    def _step_partitioned(self) -> Tensor:
        """Step in stages 1 to 3, which skip a step with a non-finite norm and report it as infinite."""
        self._engine.step()
        if self._sliced is not None:
            self._sliced.finish_step()
        if self.layout.zero.stage == 3 and self.may_have_unused:
            zero_partitioned_gradients(self._engine.optimizer)
        return torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def training_state(self) -> EngineState:
        """Return slices of DeepSpeed's parameters and optimizer state."""
        return deepspeed_state(self._engine, *self._replica, self.loss_scale)


def mark_sharded(model: nn.Module) -> None:
    """Mark parameters that are sharded over model-parallel ranks.

    DeepSpeed's norms include a marked parameter on every tensor-parallel rank, and any other parameter only on
    the first. Without the mark, part of a sharded parameter would be missing in the norm, and gradients would be
    clipped too little.
    """
    for name, parameter in model.named_parameters():
        at = placement_of(name, parameter)
        mark_tensor_parallel(parameter, sum(map(size, at.boxes)) < math.prod(at.shape))
